"""The `kvstore` command: runs its verbs; what a user can mend is one line on standard error, not a traceback."""

from __future__ import annotations

import sys

_EXTRAS = {
    "rich": "cli",
    "typer": "cli",
    "gguf": "npu",
    "jinja2": "npu",
    "onnx": "npu",
    "onnxruntime": "npu",
    "tokenizers": "npu",
}
"""Which extra brings a package."""


def main() -> None:
    """Run the command. Exit code 2: it could not be run as asked; 1: it failed, or found damage."""
    try:
        _run()
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        _complain(f"this needs {error.name}, which is not installed; pip install 'npu-kvstore[{extra}]'")
        raise SystemExit(2) from None


def _run() -> None:
    import typer

    from .commands import app
    from .errors import InvalidRequestError, InvalidTokensError, KVStoreError

    # UsageError and what it is one of, which typer does not name
    usage: tuple[type[Exception], ...] = typer.BadParameter.__mro__[1:3]
    try:
        code = typer.main.get_command(app)(standalone_mode=False)
    except typer.Abort:
        _complain("nothing was changed")
        raise SystemExit(1) from None
    except usage as error:
        if message := _in_one_line(error):  # else help was printed, as no verb was given
            _complain(message)
        raise SystemExit(getattr(error, "exit_code", 2)) from None
    except (InvalidRequestError, InvalidTokensError) as error:
        _complain(str(error))
        raise SystemExit(2) from None
    except KVStoreError as error:
        _complain(str(error))
        raise SystemExit(2 if isinstance(error, _errors_of_settings()) else 1) from None
    except BrokenPipeError:  # who read our output has enough of it
        sys.stderr.close()
        raise SystemExit(1) from None
    except OSError as error:
        _complain(str(error))
        raise SystemExit(1) from None
    except ValueError as error:
        if not isinstance(error, _errors_of_models()):
            raise
        _complain(str(error))
        raise SystemExit(1) from None
    raise SystemExit(code or 0)


def _errors_of_settings() -> type[Exception]:
    from .config import ConfigError

    return ConfigError


def _errors_of_models() -> tuple[type[Exception], ...]:
    """What a model file can be to blame for. Imported late: without the engine there is none."""
    from kvstore.pipeline.chat import ChatTemplateError
    from kvstore.pipeline.gguf_metadata import GgufError
    from kvstore.pipeline.tokenizer import TokenizerError
    from kvstore.pipeline.weights import UnsupportedModel

    return ChatTemplateError, GgufError, TokenizerError, UnsupportedModel


def _in_one_line(error: Exception) -> str:
    """What is wrong with the arguments, and where to read what is right."""
    command = getattr(getattr(error, "ctx", None), "command_path", "kvstore")
    said = str(error.format_message()) if hasattr(error, "format_message") else str(error)
    return f"{' '.join(said.split())} (see `{command} --help`)" if said.strip() else ""


def _complain(message: str) -> None:
    print(f"kvstore: {' '.join(message.split())}", file=sys.stderr)


if __name__ == "__main__":
    main()
