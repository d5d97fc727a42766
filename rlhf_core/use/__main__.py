"""Chats with a trained model, serves it (a policy, or a reward model to scorers), or exports a copy: rlhf chat, serve and export.

The default model is models/policy of the current folder. Exit code 2: refused, with the reason.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from cyclopts import Group, Parameter
from cyclopts.validators import Number, mutually_exclusive

from rlhf_core.commands import INTERRUPTED, REFUSED, Count, FileOrName, GivenPath, run_module
from rlhf_core.config import ConfigError
from rlhf_core.process import configure_process, exit_with

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_MODEL = Group("Model", validator=mutually_exclusive)


@Parameter(name="*")
@dataclass(frozen=True)
class Choice:
    """The model to use.

    Args:
        run: the policy in runs/RUN.
        model: a model's folder, such as rounds/3/policy.
        version: version in the registry, such as policy@v1.0.0 or reward-model@v1.0.0; its files are fetched and verified.
    """

    run: Annotated[str | None, Parameter(group=_MODEL)] = None
    model: Annotated[GivenPath | None, Parameter(group=_MODEL)] = None
    version: Annotated[str | None, Parameter(group=_MODEL)] = None

    def chosen(self):
        from rlhf_core.use.choice import choose

        return choose(run=self.run, model=self.model, version=self.version)


POLICY_HERE = Choice()


def refusing(command: Callable[..., int]) -> Callable[..., int]:
    """Return the command, which prints why it refuses."""

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> int:
        configure_process()
        try:
            return command(*arguments, **options)
        except ValueError as error:  # ConfigError is one
            from rlhf_core.use.chat import plain

            print(plain(str(error)), file=sys.stderr)
            return REFUSED
        except KeyboardInterrupt:
            return INTERRUPTED

    return run


@refusing
def chat(
    *,
    choice: Choice = POLICY_HERE,
    beside: FileOrName | None = None,
    system: str | None = None,
    temperature: Annotated[float, Parameter(validator=Number(gte=0, lt=float("inf")))] = 0.7,
    top_p: Annotated[float, Parameter(validator=Number(gt=0, lte=1))] = 1.0,
    top_k: Count | None = None,
    max_new_tokens: Count = 256,
    seed: int = 0,
    threads: Count = CORES,
    max_length: Count | None = None,
    trust_remote_code: bool = False,
) -> int:
    """Chat with the model.

    Args:
        beside: `sft` sends the same messages to the run's models/sft, a folder to the model in it.
        system: a system message before each conversation.
        temperature: 0 is greedy decoding.
        top_p: of sampling.
        top_k: of sampling.
        max_new_tokens: upper limit of a response, its EOS token included.
        seed: the same seed and messages give the same answers.
        threads: of the computation.
        max_length: tokens; upper limit of a conversation, by default the model's context, at most 4096.
        trust_remote_code: run Python code from the model's folder.
    """
    from rlhf_core.engines.rollout.requests import SamplingSettings
    from rlhf_core.preparation.pictures import PictureStore
    from rlhf_core.use.chat import Partner, introduction, typed_lines
    from rlhf_core.use.chat import chat as talk
    from rlhf_core.use.choice import beside as model_beside
    from rlhf_core.use.choice import check_language_model

    models = [choice.chosen()]
    if beside is not None:
        models.append(model_beside(models[0], beside))
    for model in models:
        check_language_model(model)
    sampling = SamplingSettings(max_new_tokens, temperature, top_p=top_p, top_k=top_k)
    with TemporaryDirectory() as images:
        shared = {"max_length": max_length, "system": system, "seed": seed, "threads": threads, "trust": trust_remote_code}
        partners = [Partner(model, sampling, images=Path(images), **shared) for model in models]
        print(introduction(partners, sampling), file=sys.stderr, flush=True)
        talk(partners, typed_lines(), sys.stdout, sys.stderr, PictureStore(Path(images)))
    return 0


@refusing
def serve(
    *,
    choice: Choice = POLICY_HERE,
    host: str = "127.0.0.1",
    port: Count = 8000,
    api_key_env: str | None = None,
    start_timeout: Count = 600,
    max_length: Count | None = None,
    trust_remote_code: bool = False,
) -> int:
    """Serve the model.

    Args:
        host: address to listen on; one that other machines reach needs --api-key-env.
        port: to listen on.
        api_key_env: environment variable with the API key that requests must send.
        start_timeout: seconds; deadline for the server's first answer.
        max_length: tokens; upper limit of a conversation, by default the model's context, at most 4096.
        trust_remote_code: run Python code from the model's folder.
    """
    from rlhf_core.engines.vllm.server import ServerSettings
    from rlhf_core.use import serve as servers
    from rlhf_core.use.choice import context_length, reward_class, saved_dtype

    key = None if api_key_env is None else os.environ.get(api_key_env)
    if api_key_env is not None and not key:
        raise ConfigError(f"--api-key-env: expected a key in the environment variable {api_key_env}, got nothing; set it")
    chosen = choice.chosen()
    settings = ServerSettings(
        name=chosen.name,
        folder=chosen.folder,
        host=host,
        port=port,
        api_key=key,
        max_length=context_length(chosen, max_length, trust_remote_code=trust_remote_code),
        dtype=saved_dtype(chosen, trust_remote_code=trust_remote_code),
        trust_remote_code=trust_remote_code,
        start_seconds=start_timeout,
    )
    servers.check_address(settings)
    if reward_class(chosen) is not None:
        from rlhf_core.use.rewards import serve_rewards

        return serve_rewards(chosen, settings, sys.stdout, key_variable=api_key_env)
    servers.check_servable(chosen, trust_remote_code=trust_remote_code)
    return servers.serve(settings, sys.stdout, key_variable=api_key_env)


@refusing
def export(folder: GivenPath, /, *, choice: Choice = POLICY_HERE) -> int:
    """Copy the model with a card.

    Args:
        folder: to be made.
    """
    from rlhf_core.use.export import export as copy

    print(f"{copy(choice.chosen(), folder)}: the model with its card")
    return 0


def main(arguments: list[str] | None = None) -> int:
    return run_module("", arguments)


if __name__ == "__main__":
    exit_with(main)
