"""Chat with a trained model, serve it (a policy, or a reward model to scorers), or export a copy.

    python -m rlhf_core.use chat  [--run NAME | --model FOLDER | --version policy@v1.0.0] [--beside sft] [--system TEXT] [--temperature 0.7]
    python -m rlhf_core.use serve [the same] [--port 8000] [--host 127.0.0.1] [--api-key-env NAME]
    python -m rlhf_core.use export FOLDER [the same]

The default model is models/policy of the current folder. Exit code 2: refused, with the reason.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rlhf_core.config import ConfigError
from rlhf_core.process import configure_process, exit_with

REFUSED, INTERRUPTED = 2, 130


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m rlhf_core.use", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    added = commands.add_parser("chat", help="chat with the model, one message per line; works with pipes", allow_abbrev=False)
    _choice(added)
    _running(added)
    added.add_argument("--beside", metavar="sft|FOLDER", help="send the same messages to the run's models/sft, or to the model in a folder")
    added.add_argument("--system", metavar="TEXT", help="a system message before each conversation")
    added.add_argument("--temperature", type=_not_negative, default=0.7, help="0: greedy decoding (%(default)s)")
    added.add_argument("--top-p", type=_share, default=1.0)
    added.add_argument("--top-k", type=_count)
    added.add_argument("--max-new-tokens", type=_count, default=256, help="upper limit of a response, its EOS token included (%(default)s)")
    added.add_argument("--seed", type=int, default=0, help="the same seed and messages give the same answers (%(default)s)")
    added.add_argument(
        "--threads", type=_count, default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    )
    added = commands.add_parser(
        "serve", help="serve a policy with vLLM's OpenAI server, or a reward model to scorers of kind http", allow_abbrev=False
    )
    _choice(added)
    _running(added)
    added.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; one that other machines reach needs --api-key-env (%(default)s)"
    )
    added.add_argument("--port", type=_count, default=8000, help="(%(default)s)")
    added.add_argument("--api-key-env", metavar="NAME", help="environment variable with the API key that requests must send")
    added.add_argument(
        "--start-timeout", type=_count, default=600, metavar="SECONDS", help="deadline for the server's first answer (%(default)s)"
    )
    added = commands.add_parser("export", help="copy the model with a card that has its evaluation", allow_abbrev=False)
    added.add_argument("folder", type=Path, metavar="FOLDER", help="to be made")
    _choice(added)
    return parser.parse_args(arguments)


def _choice(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--run", metavar="NAME", help="the policy in runs/NAME")
    group.add_argument("--model", type=Path, metavar="FOLDER", help="a model's folder, such as rounds/3/policy")
    group.add_argument(
        "--version",
        metavar="VERSION",
        help="version in the registry, such as policy@v1.0.0 or reward-model@v1.0.0; its files are fetched and verified",
    )


def _running(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-length", type=_count, metavar="TOKENS", help="upper limit of a conversation (default: the model's context, at most 4096)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code from the model's folder")


def _count(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {value}")
    return int(value)


def _not_negative(value: str) -> float:
    return _number(value, lambda number: number >= 0, "a number of at least 0")


def _share(value: str) -> float:
    return _number(value, lambda number: 0 < number <= 1, "a number above 0 and up to 1")


def _number(value: str, fits, expected: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not fits(number) or number == float("inf"):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {value}")
    return number


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    configure_process()
    try:
        return {"chat": _chat, "serve": _serve, "export": _export}[options.command](options)
    except ValueError as error:  # ConfigError is one
        from rlhf_core.use.chat import plain

        print(plain(str(error)), file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED


def _chosen(options: argparse.Namespace):
    from rlhf_core.use.choice import choose

    return choose(run=options.run, model=options.model, version=options.version)


def _chat(options: argparse.Namespace) -> int:
    from rlhf_core.engines.rollout.requests import SamplingSettings
    from rlhf_core.use.chat import Partner, chat, introduction, typed_lines
    from rlhf_core.use.choice import beside, check_language_model

    models = [_chosen(options)]
    if options.beside is not None:
        models.append(beside(models[0], options.beside))
    for model in models:
        check_language_model(model)
    sampling = SamplingSettings(options.max_new_tokens, options.temperature, top_p=options.top_p, top_k=options.top_k)
    shared = {"max_length": options.max_length, "system": options.system, "seed": options.seed, "threads": options.threads}
    partners = [Partner(model, sampling, trust=options.trust_remote_code, **shared) for model in models]
    print(introduction(partners, sampling), file=sys.stderr, flush=True)
    chat(partners, typed_lines(), sys.stdout, sys.stderr)
    return 0


def _serve(options: argparse.Namespace) -> int:
    from rlhf_core.engines.vllm.server import ServerSettings
    from rlhf_core.use.choice import context_length, reward_class, saved_dtype
    from rlhf_core.use.serve import check_address, check_servable, serve

    trust = options.trust_remote_code
    key = None if options.api_key_env is None else os.environ.get(options.api_key_env)
    if options.api_key_env is not None and not key:
        raise ConfigError(f"--api-key-env: expected a key in the environment variable {options.api_key_env}, got nothing; set it")
    chosen = _chosen(options)
    settings = ServerSettings(
        name=chosen.name,
        folder=chosen.folder,
        host=options.host,
        port=options.port,
        api_key=key,
        max_length=context_length(chosen, options.max_length, trust_remote_code=trust),
        dtype=saved_dtype(chosen, trust_remote_code=trust),
        trust_remote_code=trust,
        start_seconds=options.start_timeout,
    )
    check_address(settings)
    if reward_class(chosen) is not None:
        from rlhf_core.use.rewards import serve_rewards

        return serve_rewards(chosen, settings, sys.stdout, key_variable=options.api_key_env)
    check_servable(chosen, trust_remote_code=trust)
    return serve(settings, sys.stdout, key_variable=options.api_key_env)


def _export(options: argparse.Namespace) -> int:
    from rlhf_core.use.export import export

    print(f"{export(_chosen(options), options.folder)}: the model with its card")
    return 0


if __name__ == "__main__":
    exit_with(main)
