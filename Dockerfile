# One image for the server and the workers; what a container runs is its command (see docker-compose.yml).
FROM python:3.12-slim AS build
WORKDIR /source
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements.lock ./
RUN --mount=type=cache,target=/root/.cache/pip pip install --constraint requirements.lock hatchling
COPY pyproject.toml README.md ./
COPY service service
COPY weighbridge weighbridge
COPY web web
COPY examples examples
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

FROM python:3.12-slim
# The lock has the exact versions; the extras say which of them are needed to run, tests and browsers apart.
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=build,source=/wheels,target=/wheels \
    --mount=type=bind,source=requirements.lock,target=/requirements.lock \
    pip install --disable-pip-version-check --constraint /requirements.lock "$(echo /wheels/weighbridge-*.whl)[service,compile,postgresql]"
RUN useradd --uid 10001 --home-dir /data --create-home weighbridge
USER weighbridge
WORKDIR /data
ENV WEIGHBRIDGE_DATA_DIR=/data PYTHONUNBUFFERED=1
VOLUME /data
EXPOSE 8090
CMD ["python", "-m", "service", "serve"]
