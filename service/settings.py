"""Everything the service reads from its environment, in one frozen object; the only place that looks at `WEIGHBRIDGE_…` variables.

`Settings.from_environment()` is called once, by whatever starts (server, worker, command line), and handed on; importing this
module reads nothing, creates nothing and changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from service.compile.interface import ChildLimits

PREFIX = "WEIGHBRIDGE_"
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})
_GIB = 1 << 30


class SettingsError(ValueError):
    """An environment variable holds what cannot be used; names each one, its value and what would be legal."""


def _total_memory_bytes() -> int:
    """Memory of this machine, or of the container's limit where that is smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    try:
        text = limit.read_text().strip()
    except OSError:
        return total
    return min(total, int(text)) if text.isdigit() else total


class Settings(BaseModel):
    """How this process runs. Each field is set by the variable `WEIGHBRIDGE_` + its name in capitals."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    data_dir: Path = Field(default=Path(".weighbridge"), description="database, artifacts and caches; created where first needed")
    database_url: str = Field(default="", description="SQLAlchemy URL; empty is SQLite in data_dir")
    host: str = Field(default="127.0.0.1", description="address the server listens on; anything but loopback needs tokens")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(default=8090, description="0 takes a free one")

    worker_slots: Annotated[int, Field(ge=1, le=64)] = Field(default=2, description="most compile children at once in one worker")
    worker_memory_bytes: Annotated[int, Field(ge=_GIB)] = Field(
        default_factory=lambda: _total_memory_bytes() * 3 // 4, description="memory that all children of one worker may be expected to take"
    )
    lease_seconds: Annotated[float, Field(gt=0)] = Field(default=60.0, description="a worker silent for this long loses its jobs")
    heartbeat_seconds: Annotated[float, Field(gt=0)] = Field(default=10.0, description="between two renewals of a lease")
    poll_seconds: Annotated[float, Field(gt=0)] = Field(default=0.5, description="between two looks of an idle worker at the queue")
    max_attempts: Annotated[int, Field(ge=1, le=10)] = Field(default=3, description="times a job is started before it is recorded as lost")

    child_wall_seconds: Annotated[float, Field(gt=0)] = Field(default=1800.0, description="a child is killed after this long")
    child_rss_limit_bytes: Annotated[int, Field(ge=256 << 20)] = Field(
        default=8 * _GIB, description="a child is killed when its process group holds more resident memory"
    )

    max_body_bytes: Annotated[int, Field(ge=1 << 10)] = Field(default=1 << 20, description="largest request body")
    require_tokens: bool = Field(default=False, description="ask for tokens on loopback too; always asked for elsewhere")
    token_sha256: str = Field(
        default="", pattern=r"^([0-9a-f]{64}(,[0-9a-f]{64})*)?$", description="SHA-256 in hex of each token that is taken, with commas"
    )

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        # Children and workers run in other directories: a relative path must mean the same place to all of them.
        return value.expanduser().absolute()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
        """Settings from `WEIGHBRIDGE_…` variables; `overrides` (from command-line options) win where they are not None.

        Raises:
            SettingsError: a value cannot be used, or a variable with the prefix has no setting (a misspelt limit would not limit).
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {name[len(PREFIX) :].lower(): value for name, value in environ.items() if name.startswith(PREFIX)}
        # The client's own variables (where the server is, its token) share the prefix and are not this process's settings.
        values = {name: value for name, value in values.items() if name not in CLIENT_VARIABLES}
        values |= {name: value for name, value in overrides.items() if value is not None}
        try:
            return cls(**values)
        except ValidationError as error:
            known = ", ".join(PREFIX + name.upper() for name in cls.model_fields)
            lines = [
                f"{PREFIX}{'_'.join(map(str, problem['loc'])).upper()} is {problem['input']!r}: "
                + ("there is no such setting" if problem["type"] == "extra_forbidden" else problem["msg"])
                for problem in error.errors(include_url=False)
            ]
            raise SettingsError("; ".join(lines) + f". Known variables: {known}") from None

    def as_environment(self) -> dict[str, str]:
        """The variables from which `from_environment` makes these settings again, in another process."""
        return {PREFIX + name.upper(): str(value) for name, value in self.model_dump(mode="json").items()}

    @property
    def resolved_database_url(self) -> str:
        """`database_url`, or SQLite's in `data_dir`."""
        return self.database_url or f"sqlite:///{self.data_dir / 'weighbridge.sqlite'}"

    @property
    def artifact_dir(self) -> Path:
        """Where artifacts are kept, by content hash."""
        return self.data_dir / "artifacts"

    @property
    def work_dir(self) -> Path:
        """Parent of the children's own directories; everything in it can go when no child runs."""
        return self.data_dir / "work"

    @property
    def capacity_cache(self) -> Path:
        """JSON file with the HBM capacities that the compiler stated."""
        return self.data_dir / "capacity.json"

    @property
    def tokens_required(self) -> bool:
        """Whether a request needs a token: everywhere but on loopback, and there too where it is asked for."""
        return self.require_tokens or self.host not in LOOPBACK_HOSTS

    @property
    def token_hashes(self) -> tuple[str, ...]:
        """SHA-256 of each token that is taken, where tokens are asked for.

        Raises:
            SettingsError: tokens are needed and none is configured.
        """
        hashes = tuple(filter(None, self.token_sha256.split(",")))
        if self.tokens_required and not hashes:
            reason = "WEIGHBRIDGE_REQUIRE_TOKENS is set" if self.require_tokens else f"{self.host} can be reached from other machines"
            raise SettingsError(
                f"{reason}, and no token is configured; set WEIGHBRIDGE_TOKEN_SHA256 to what `printf %s TOKEN | sha256sum` prints, "
                f"or listen on loopback only: {', '.join(sorted(LOOPBACK_HOSTS))}"
            )
        return hashes if self.tokens_required else ()

    @property
    def child_limits(self) -> ChildLimits:
        """When a compile child is killed."""
        return ChildLimits(wall_seconds=self.child_wall_seconds, rss_bytes=self.child_rss_limit_bytes)


CLIENT_VARIABLES = frozenset({"url", "token", "project"})
"""What `weighbridge submit` and its like read with the same prefix: WEIGHBRIDGE_URL, WEIGHBRIDGE_TOKEN, WEIGHBRIDGE_PROJECT."""
