"""One device against four, in a process of its own because the number of devices is fixed when JAX starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh
import models

out = {}
devices = np.array(jax.devices())
meshes = {
    "model4": Mesh(devices, ("model",)),
    "data2_model2": Mesh(devices.reshape(2, 2), ("data", "model")),
    "explicit": jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Explicit,)),
}
for folder in ("llama31_tiny", "qwen2_tiny", "qwen3_tiny", "phi3_tiny"):
    path = sys.argv[1] + "/" + folder
    tokens = np.load(path + "/golden.npz")["tokens"][:, :64]
    one = np.asarray(models.load(path).logits(tokens))
    for name, mesh in meshes.items():
        for scan in (False, True) if folder == "llama31_tiny" else (False,):
            model = models.load(path, mesh=mesh, scan_layers=scan)
            error = np.abs(np.asarray(model.logits(tokens)) - one).max() / one.std()
            split = sum(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(model.forward))
            out[f"{folder} {name} {scan}"] = (float(error), split)
try:
    models.load(sys.argv[1] + "/qwen2_tiny", mesh=Mesh(devices, ("data",)))
except ValueError as error:
    out["refused"] = str(error)
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def results() -> dict:
    root = Path(__file__).parents[2]
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(root / "tests" / "data" / "models")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_four_devices_give_the_logits_of_one(results) -> None:
    errors = {name: value[0] for name, value in results.items() if name != "refused"}
    assert len(errors) == 15
    assert max(errors.values()) < 1e-5, errors


def test_what_divides_is_split_and_the_rest_is_replicated(results) -> None:
    # llama31: q, o, gate, up and down of 2 layers, the embedding and the head; its one KV head stays whole.
    assert results["llama31_tiny model4 False"][1] == 12
    # qwen2: 2 query heads over 4 devices stay whole, so gate, up and down of 2 layers and the tied embedding.
    assert results["qwen2_tiny model4 False"][1] == 7
    # qwen3 over 2 devices: all seven matrices of 3 layers and the embedding.
    assert results["qwen3_tiny data2_model2 False"][1] == 22


def test_a_mesh_without_a_model_axis_is_refused(results) -> None:
    assert "'model'" in results["refused"]
