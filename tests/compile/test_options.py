"""Every compiler option a spec may set is one the real compiler knows, with the type it takes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from service.compile.options import ALLOWED, legal_value

_COMPILE_EACH = """
import json, os, sys
os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_ACCELERATOR_TYPE="v5e-4",
                  TPU_WORKER_HOSTNAMES="localhost", TPU_LOG_DIR=sys.argv[1])
import jax
from jax.experimental import topologies
device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
x = jax.ShapeDtypeStruct((24, 128), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
lowered = jax.jit(lambda a: a @ a.T).trace(x).lower()
answers = {}
for name, value in json.loads(sys.argv[2]).items():
    try:
        answers[name] = lowered.compile(compiler_options={name: value}).memory_analysis().argument_size_in_bytes
    except Exception as error:
        answers[name] = str(error)
print(json.dumps(answers))
"""


@pytest.mark.tpu
def test_the_compiler_knows_every_option_and_refuses_another(tmp_path) -> None:
    options = {name: True if kind is bool else 1400 for name, kind in ALLOWED.items()} | {"xla_no_such_option": True}
    command = [sys.executable, "-c", _COMPILE_EACH, str(tmp_path), json.dumps(options)]
    answers = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert "No such compile option" in answers.pop("xla_no_such_option")
    assert answers == dict.fromkeys(ALLOWED, 24 * 128 * 4)


def test_no_option_writes_files_or_loads_code() -> None:
    assert not {word for name in ALLOWED for word in name.split("_")} & {"dump", "path", "file", "dir", "cache", "load", "library"}


def test_a_value_has_exactly_the_options_type() -> None:
    assert legal_value("xla_tpu_max_hbm_size_mib", 1400)
    assert not legal_value("xla_tpu_max_hbm_size_mib", True)
    assert not legal_value("xla_tpu_max_hbm_size_mib", -1)
    assert not legal_value("xla_tpu_rwb_fusion", 1)
