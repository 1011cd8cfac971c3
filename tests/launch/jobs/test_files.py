"""The files in `launch/jobs/` that other launchers read: DeepSpeed's by its own parser, Kubernetes' by its structure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
JOBS = ROOT / "launch" / "jobs"


@pytest.fixture(scope="module")
def deepspeed():
    return pytest.importorskip("deepspeed")


@pytest.mark.parametrize("stage", range(4), ids="zero{}".format)
def test_deepspeed_takes_its_configs(deepspeed, stage):
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

    path = JOBS / "deepspeed" / f"zero{stage}.json"
    config = DeepSpeedConfig(str(path))
    assert config.zero_optimization_stage == stage
    assert config.zero_enabled == (stage > 0)
    assert config.bfloat16_config.enabled
    assert not config.float16_config.enabled
    assert config.scheduler_name in VALID_LR_SCHEDULES
    assert config.gradient_clipping == 1.0
    # the parser ignores a section that it does not know
    known = {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "steps_per_print"}
    assert set(json.loads(path.read_text())) - known == {"optimizer", "scheduler", "bf16", "zero_optimization"}


def test_the_configs_differ_only_in_their_zero_section():
    configs = [json.loads((JOBS / "deepspeed" / f"zero{stage}.json").read_text()) for stage in range(4)]
    rest = [{name: value for name, value in config.items() if name != "zero_optimization"} for config in configs]
    assert rest == rest[:1] * 4


def test_deepspeed_reads_the_host_file(deepspeed):
    from deepspeed.launcher.runner import fetch_hostfile

    assert dict(fetch_hostfile(str(JOBS / "deepspeed" / "hostfile"))) == {"node01": 8, "node02": 8}


def test_the_kubernetes_job_is_complete():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((JOBS / "kubernetes" / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1
    for kind in replicas.values():
        assert kind["restartPolicy"] == "Never"
        pod = kind["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"
        assert container["command"] == ["launch/jobs/torchrun.sh"]
        assert (ROOT / container["args"][0]).exists()
        assert container["resources"]["limits"]["nvidia.com/gpu"] == job["spec"]["nprocPerNode"]
        # the pod defines every volume that is mounted
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert pod["volumes"][0]["emptyDir"]["medium"] == "Memory"
