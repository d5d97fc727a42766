"""Environment variables that a stage and its child processes may see: a fixed list, and those named in params.yaml.

Reward functions, judges and a model's remote code run in these processes. They don't see the tokens and cloud keys of the shell unless
flow.environment names them. A stage gets a key that it needs (HF_TOKEN) if params use the service; a tracker's key goes to
the tracker's own process (flows/trackers).
This isn't a sandbox: code that runs as a user can read that user's files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from pathlib import Path

from rlhf_core.config import Params

# Of programs in general: paths, locale, temporary files, certificates, proxies, compilers.
NAMES = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "HOSTNAME", "LANG", "LANGUAGE", "TZ", "TZDIR", "TMPDIR"),
        *("TEMP", "TMP", "TERM", "COLUMNS", "LINES", "NO_COLOR", "DO_NOT_TRACK", "SSL_CERT_FILE", "SSL_CERT_DIR"),
        *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy"),
        *("https_proxy", "all_proxy", "no_proxy", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "CC", "CXX"),
        *("CFLAGS", "CXXFLAGS", "LDFLAGS", "MAX_JOBS", "CUDACXX", "CUDAHOSTCXX", "CONDA_PREFIX", "MASTER_ADDR", "MASTER_PORT"),
        *("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        *("USE_TORCH", "USE_TF", "MPLCONFIGDIR", "HF_HUB_DISABLE_IMPLICIT_TOKEN"),
        # Settings that engines/ray/cluster.py doesn't override.
        *("DASHBOARD_METRIC_PORT", "REPORTER_UPDATE_INTERVAL_MS", "METRICS_RECORD_INTERVAL_S"),
    )
)
# Settings of libraries, accelerators, threads and the scheduler.
PREFIXES = (
    *("LC_", "XDG_", "PYTHON", "RLHF_", "COVERAGE_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "OMP_", "GOMP_", "KMP_"),
    *("MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "RAYON_", "NVCC_", "MALLOC_", "DNNL_", "ONEDNN_", "ATEN_", "GLOO_", "CUDA_", "CUDNN_"),
    *("CUBLAS_", "NVIDIA_", "NCCL_", "NVSHMEM_", "HIP_", "HSA_", "ROCM_", "ROCR_", "RCCL_", "MIOPEN_", "UCX_", "FI_"),
    *("TORCH", "PYTORCH_", "TRITON_", "FLASHINFER_", "FLASH_ATTENTION_", "BNB_", "DS_", "DEEPSPEED_", "VLLM_"),
    *("RAY_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "SAFETENSORS_", "ACCELERATE_", "WANDB_"),
    *("TENSORBOARD_", "DVC_", "GX_", "NUMBA_", "ARROW_", "TIKTOKEN_"),
)
# Suffixes of secrets among the listed names: HF_TOKEN, VLLM_API_KEY, SLURM_JWT.
_SECRET = re.compile(r"(TOKEN|KEYS?|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|JWT)(_?\d+)?$")

NAMED = "RLHF_ENVIRONMENT"  # the names in flow.environment, for processes that read no params.yaml
WITHHELD = "RLHF_WITHHELD"  # names of removed variables, without values, for hints
TRAINING = ("train_sft", "train_reward", "train_policy", "train_round")  # stages that write curves
# Stages that read models from outside the chain.
MODEL_READERS = ("hash_inputs", "prepare_data", "check_model", "train_sft", "train_reward", "train_policy")
INFERENCE_STAGES = ("gate_reward", "evaluate", "sample_round", "evaluate_round")  # stages on cluster.inference_ranks ranks


def is_listed(name: str) -> bool:
    return name in NAMES or (name.startswith(PREFIXES) and not _SECRET.search(name))


def of_stage(params: Params, stage: str | None, environment: Mapping[str, str]) -> set[str]:
    """Names that a stage may see in addition to the list.

    Args:
        stage: of dvc.yaml, or DVC's address of a round's stage (rounds/dvc.yaml:train_round@1); None: any stage.
        environment: HF_HUB_OFFLINE in it decides whether the hub is used.
    """
    stage = stage and stage.rpartition(":")[2].partition("@")[0]
    names = set(params.environment)
    if stage in (None, *MODEL_READERS) and _asks_the_hub(params, environment):
        names |= {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}
    if params.cluster.address is not None and stage in (None, *TRAINING, *(INFERENCE_STAGES if params.cluster.inference_ranks > 1 else ())):
        names.add("RAY_AUTH_TOKEN")
    return names


def _asks_the_hub(params: Params, environment: Mapping[str, str]) -> bool:
    """Return whether params name a model or data set of the hub and the hub may be used."""
    if environment.get("HF_HUB_OFFLINE", "1").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    named = [params.model.path, params.reward.path, params.external.path, *params.teachers.values()]
    named += [s.path for s in params.data.sources if s.kind == "huggingface"]
    return any(path is not None and not Path(path).exists() for path in named)


def keep_visible(more: Collection[str], *, named: Iterable[str] | None = None, environment: MutableMapping[str, str] = os.environ) -> None:
    """Remove all other variables from the environment of this process and its future children; their names are kept for hints.

    Args:
        named: names in flow.environment, passed on to child processes; None: those inherited from the parent.
    """
    hidden = [name for name in environment if name not in more and not is_listed(name)]
    for name in hidden:
        del environment[name]
    environment[WITHHELD] = ",".join(sorted({*hidden, *_names(environment, WITHHELD)} - set(more)))
    if named is not None:
        environment[NAMED] = ",".join(sorted(named))


def passed_on() -> dict[str, str]:
    """Return the variables that carry these rules to a process on another node, which inherits nothing."""
    return {name: os.environ.get(name, "") for name in (NAMED, WITHHELD)}


def named(environment: Mapping[str, str] = os.environ) -> set[str]:
    return _names(environment, NAMED)


def _names(environment: Mapping[str, str], variable: str) -> set[str]:
    return set(filter(None, environment.get(variable, "").split(",")))


def hint(error: BaseException, environment: Mapping[str, str] = os.environ) -> str:
    """Hint for an error message of a user's code that names a removed variable; empty if it names none."""
    words = set(re.findall(r"\w+", str(error)))
    missing = sorted(words & _names(environment, WITHHELD))
    if not missing:
        return ""
    return (
        f"; {', '.join(missing)} is set in the shell but hidden from stages: if this code may read it, name it in flow.environment of "
        "params.yaml"
    )
