"""The verbs of the `kvstore` command."""

from __future__ import annotations

import typer

from . import changing, files, key, looking, machine, running

app = typer.Typer(no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False)


@app.callback()
def about() -> None:
    """KV-cache store for on-device LLM inference: see what is held and why, and act on it.

    Verbs work on the daemon that listens on --socket, or on the data directory --dir; without either, on the daemon
    that the configuration names if it runs, else on the configured directory.
    """


for verb in (
    running.demo,
    running.serve,
    looking.status,
    looking.quota,
    running.top,
    looking.ls,
    looking.show,
    looking.tree,
    looking.explain,
    files.verify,
    changing.flush,
    changing.purge,
    changing.pin,
    changing.unpin,
    changing.warm,
    changing.gc,
    running.calibrate,
    files.export,
    machine.doctor,
):
    app.command()(verb)
app.command("import")(files.import_)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(running.bench)

keys = typer.Typer(no_args_is_help=True, help="The keys that encrypt what lies on flash, one a tenant.")
keys.command()(key.new)
keys.command()(key.rotate)
keys.command()(key.drop)
app.add_typer(keys, name="key")

configuration = typer.Typer(no_args_is_help=True, help="Settings in use, and where each comes from.")
configuration.command("show")(machine.config_show)
app.add_typer(configuration, name="config")
