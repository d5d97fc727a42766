"""Which environment variables a stage and what it starts may see: those of a list, and what params.yaml names.

A reward function, a judge and a model's remote code run in these processes. Tokens and cloud keys of the shell are none of their business
unless flow.environment names them; a key that the stage itself needs (WANDB_API_KEY, HF_TOKEN) it gets where params say that it is used.
This keeps secrets out of what is started; it is no wall: code that runs as a user can read that user's files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from pathlib import Path

from rlhf_core.config import Params

# What programs run with: paths, locale, temporary files, certificates, proxies, compilers.
NAMES = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "HOSTNAME", "LANG", "LANGUAGE", "TZ", "TZDIR", "TMPDIR"),
        *("TEMP", "TMP", "TERM", "COLUMNS", "LINES", "NO_COLOR", "DO_NOT_TRACK", "SSL_CERT_FILE", "SSL_CERT_DIR"),
        *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy"),
        *("https_proxy", "all_proxy", "no_proxy", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "CC", "CXX"),
        *("CFLAGS", "CXXFLAGS", "LDFLAGS", "MAX_JOBS", "CUDACXX", "CUDAHOSTCXX", "CONDA_PREFIX", "MASTER_ADDR", "MASTER_PORT"),
        *("USE_TORCH", "USE_TF", "MPLCONFIGDIR", "HF_HUB_DISABLE_IMPLICIT_TOKEN"),
        # What engines/ray_cluster.py leaves to a user who has set it.
        *("DASHBOARD_METRIC_PORT", "REPORTER_UPDATE_INTERVAL_MS", "METRICS_RECORD_INTERVAL_S"),
    )
)
# Settings of the libraries that stages use, of accelerators, threads and the scheduler.
PREFIXES = (
    *("LC_", "XDG_", "PYTHON", "RLHF_", "COVERAGE_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "OMP_", "GOMP_", "KMP_"),
    *("MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "RAYON_", "NVCC_", "MALLOC_", "DNNL_", "ONEDNN_", "ATEN_", "GLOO_", "CUDA_", "CUDNN_"),
    *("CUBLAS_", "NVIDIA_", "NCCL_", "NVSHMEM_", "HIP_", "HSA_", "ROCM_", "ROCR_", "RCCL_", "MIOPEN_", "UCX_", "FI_"),
    *("TORCH", "PYTORCH_", "TRITON_", "FLASHINFER_", "FLASH_ATTENTION_", "BNB_", "DS_", "DEEPSPEED_", "VLLM_"),
    *("RAY_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "SAFETENSORS_", "ACCELERATE_", "WANDB_"),
    *("TENSORBOARD_", "DVC_", "GX_", "NUMBA_", "ARROW_", "TIKTOKEN_"),
)
# A name on the list that ends so holds a secret all the same: HF_TOKEN, VLLM_API_KEY, SLURM_JWT.
_SECRET = re.compile(r"(TOKEN|KEYS?|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|JWT)(_?\d+)?$")

NAMED = "RLHF_ENVIRONMENT"  # what flow.environment names, for processes that read no params.yaml
WITHHELD = "RLHF_WITHHELD"  # names of what was there and isn't seen, for hints; no values
TRAINING = ("train_sft", "train_reward", "train_policy", "train_round")  # stages that write curves
MODEL_READERS = ("hash_inputs", "prepare_data", "check_model", "train_sft")  # stages that read model.path


def is_listed(name: str) -> bool:
    return name in NAMES or (name.startswith(PREFIXES) and not _SECRET.search(name))


def of_stage(params: Params, stage: str | None, environment: Mapping[str, str]) -> set[str]:
    """Names that a stage may see beside those of the list.

    Args:
        stage: of dvc.yaml, or as DVC addresses one of a round (rounds/dvc.yaml:train_round@1); None: of any.
        environment: of which HF_HUB_OFFLINE says whether the hub is asked at all.
    """
    stage = stage and stage.rpartition(":")[2].partition("@")[0]
    names = set(params.flow.environment)
    if params.tracking.wandb_project is not None and stage in (None, *TRAINING):
        names.add("WANDB_API_KEY")
    if stage in (None, *MODEL_READERS) and _asks_the_hub(params, environment):
        names |= {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}
    if params.cluster.address is not None and stage in (None, "train_policy"):
        names.add("RAY_AUTH_TOKEN")
    return names


def _asks_the_hub(params: Params, environment: Mapping[str, str]) -> bool:
    """Something that params name has a name on the hub, and the hub may be asked."""
    if environment.get("HF_HUB_OFFLINE", "1").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    named = [params.model.path, *(s.path for s in params.data.sources if s.kind == "huggingface")]
    return any(path is not None and not Path(path).exists() for path in named)


def keep_visible(more: Collection[str], *, named: Iterable[str] | None = None, environment: MutableMapping[str, str] = os.environ) -> None:
    """Take everything else out of this process's environment, and so out of all that it starts; the names of it are kept for hints.

    Args:
        named: what flow.environment names, for processes of this one's; None: those that came with the environment.
    """
    hidden = [name for name in environment if name not in more and not is_listed(name)]
    for name in hidden:
        del environment[name]
    environment[WITHHELD] = ",".join(sorted({*hidden, *_names(environment, WITHHELD)} - set(more)))
    if named is not None:
        environment[NAMED] = ",".join(sorted(named))


def passed_on() -> dict[str, str]:
    """What a process that is started elsewhere, and inherits nothing, has to be told of the rules here."""
    return {name: os.environ.get(name, "") for name in (NAMED, WITHHELD)}


def named(environment: Mapping[str, str] = os.environ) -> set[str]:
    return _names(environment, NAMED)


def _names(environment: Mapping[str, str], variable: str) -> set[str]:
    return set(filter(None, environment.get(variable, "").split(",")))


def hint(error: BaseException, environment: Mapping[str, str] = os.environ) -> str:
    """What to add to the message of an error in a user's code that names a variable which is kept from it; empty where there is none."""
    words = set(re.findall(r"\w+", str(error)))
    missing = sorted(words & _names(environment, WITHHELD))
    if not missing:
        return ""
    return f"; {', '.join(missing)} is set outside, and stages don't see it: name it in flow.environment of params.yaml if this code may"
