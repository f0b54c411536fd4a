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
    """Run the command. Exit code 2: it could not be run as asked; 1: it failed."""
    try:
        _run()
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        _complain(f"this needs {error.name}, which is not installed; pip install 'npu-kvstore[{extra}]'")
        raise SystemExit(2) from None


def _run() -> None:
    from .commands import app
    from .errors import KVStoreError

    try:
        app()
    except (KVStoreError, OSError) as error:
        _complain(str(error))
        raise SystemExit(1) from None
    except ValueError as error:
        if not isinstance(error, _errors_of_models()):
            raise
        _complain(str(error))
        raise SystemExit(1) from None


def _errors_of_models() -> tuple[type[Exception], ...]:
    """What a model file can be to blame for. Imported late: without the engine there is none."""
    from kvstore.pipeline.chat import ChatTemplateError
    from kvstore.pipeline.gguf_metadata import GgufError
    from kvstore.pipeline.tokenizer import TokenizerError
    from kvstore.pipeline.weights import UnsupportedModel

    return ChatTemplateError, GgufError, TokenizerError, UnsupportedModel


def _complain(message: str) -> None:
    print(f"kvstore: {message}", file=sys.stderr)


if __name__ == "__main__":
    main()
