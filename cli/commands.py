"""The commands of `llmd`, one function each. They raise; main.py turns errors into exit codes."""

from __future__ import annotations

import os
import time
from datetime import datetime
from typing import Annotated

import typer

from .address import read_address
from .autostart import client_of, connect
from .client import ApiError, Client, Unreachable
from .errors import CommandFailed
from .render import Spinner
from .serve import become_daemon

_STOP_POLL_S = 0.1
_STOP_PROBE_S = 2.0

app = typer.Typer(
    name="llmd",
    help="Language models on your own machine.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model's name, as in smollm2:135m")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow an unencrypted registry")]
Prefix = Annotated[str, typer.Argument(metavar="[PREFIX]", help="Only names that begin so")]


def daemon() -> Client:
    """A client of the daemon, which is started if need be."""
    return connect(os.environ, read_address(os.environ))


def now() -> datetime:
    return datetime.now().astimezone()


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-v", help="Show the version")] = False,
) -> None:
    if version:
        from .main import print_version

        print_version()
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("help")
def help_page(
    context: typer.Context, command: Annotated[str, typer.Argument(metavar="[COMMAND]")] = ""
) -> None:
    """Help for a command."""
    app(args=[command, "--help"] if command else ["--help"], standalone_mode=False)


# ------------------------------------------------------------------------- the daemon


@app.command()
def serve() -> None:
    """Run the daemon in the foreground. It starts by itself when a command needs it."""
    raise typer.Exit(become_daemon())


app.command("start", hidden=True)(serve)


# ---------------------------------------------------------------------------- answers


@app.command()
def run(
    model: Model,
    prompt: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...")] = None,
    keepalive: Annotated[
        str | None, typer.Option(metavar="DURATION", help="How long the model stays: 5m, -1s, 0s")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show figures afterwards")] = False,
    insecure: Insecure = False,
    nowordwrap: Annotated[
        bool, typer.Option("--nowordwrap", help="Do not break lines between words")
    ] = False,
    format: Annotated[
        str | None, typer.Option("--format", metavar="FORMAT", help="json, or a JSON schema")
    ] = None,
    think: Annotated[
        str | None,
        typer.Option(metavar="[LEVEL]", help="true, false, low, medium, high or max"),
    ] = None,
    hidethinking: Annotated[
        bool, typer.Option("--hidethinking", help="Show the answer only")
    ] = False,
    truncate: Annotated[
        bool | None,
        typer.Option("--truncate/--no-truncate", help="Embedding models: cut a long text to fit"),
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(help="Embedding models: the vector's length")
    ] = None,
) -> None:
    """Ask a model, or talk to it. It is pulled first if it is not here."""
    from .run import RunOptions
    from .run import run as run_model

    options = RunOptions(
        keep_alive=keepalive,
        verbose=verbose,
        insecure=insecure,
        word_wrap=not nowordwrap,
        format=format,
        think=think,
        hide_thinking=hidethinking,
        truncate=truncate,
        dimensions=dimensions,
    )
    run_model(daemon(), model, prompt, options)


# ---------------------------------------------------------------------- the models folder


@app.command()
def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A name, org/repo, hf.co/org/repo:QUANT, a GGUF's address, or a path",
        ),
    ],
    insecure: Insecure = False,
    as_name: Annotated[str, typer.Option("--as", metavar="NAME", help="The name it gets")] = "",
    accept_terms: Annotated[
        bool, typer.Option("--accept-terms", help="Accept the terms of the model's makers")
    ] = False,
) -> None:
    """Fetch a model, or bring it up to date."""
    from .fetch import pull as pull_model

    pull_model(daemon(), model, insecure, as_name, accept_terms)


@app.command()
def push(model: Model, insecure: Insecure = False) -> None:
    """Send a model to the registry that its name tells: host/namespace/model:tag."""
    from .fetch import push as push_model

    push_model(daemon(), model, insecure)


@app.command()
def create(
    model: Model,
    file: Annotated[
        str, typer.Option("--file", "-f", metavar="PATH", help="The Modelfile; - is stdin")
    ] = "Modelfile",
    quantize: Annotated[
        str, typer.Option("--quantize", "-q", metavar="LEVEL", help="Q8_0, Q4_0 or Q4_K_M")
    ] = "",
) -> None:
    """Make a model of a Modelfile."""
    from .fetch import create as create_model

    create_model(daemon(), model, file, quantize)


@app.command("import")
def import_models(
    path: Annotated[
        str, typer.Argument(metavar="[PATH]", help="A folder or file; else the usual places")
    ] = "",
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="This one of those found; repeatable")
    ] = None,
    as_name: Annotated[str, typer.Option("--as", metavar="NAME", help="The name it gets")] = "",
    take_all: Annotated[bool, typer.Option("--all", help="All that is found")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what is there")] = False,
) -> None:
    """Take over models of Ollama, the Hugging Face cache, LM Studio or a folder, without a copy."""
    from .fetch import import_models as import_found

    import_found(daemon(), path, only or (), as_name, take_all, dry_run)


@app.command("list")
def list_models(
    prefix: Prefix = "",
    disk: Annotated[bool, typer.Option("--disk", help="What each costs on the disk")] = False,
) -> None:
    """The models that are installed."""
    from .tables import disk_table, list_table

    if disk:
        print(disk_table(daemon().get("/api/disk"), prefix))
    else:
        print(list_table(daemon().get("/api/tags")["models"], prefix, now()))


@app.command()
def prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go")] = False,
) -> None:
    """Remove what no model needs: left files, downloads unfinished for a week."""
    from .tables import prune_text

    print(prune_text(daemon().post("/api/prune", {"dry_run": dry_run})))


@app.command()
def verify(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="Else all of them")] = "",
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove damaged files and pull them again")
    ] = False,
) -> None:
    """Hash the files of models again and tell which are damaged."""
    from .verify import verify as verify_models

    verify_models(daemon(), model, repair)


app.command("ls", hidden=True)(list_models)


@app.command()
def show(
    model: Model,
    license: Annotated[bool, typer.Option("--license", help="Its license")] = False,
    modelfile: Annotated[bool, typer.Option("--modelfile", help="Its Modelfile")] = False,
    parameters: Annotated[bool, typer.Option("--parameters", help="Its parameters")] = False,
    system: Annotated[bool, typer.Option("--system", help="Its system message")] = False,
    template: Annotated[bool, typer.Option("--template", help="Its prompt template")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Metadata and tensors too")
    ] = False,
) -> None:
    """All about one model."""
    from .tables import show_text

    flags = {
        "license": license,
        "modelfile": modelfile,
        "parameters": parameters,
        "system": system,
        "template": template,
    }
    wanted = [name for name, is_wanted in flags.items() if is_wanted]
    if len(wanted) > 1:
        raise CommandFailed(
            "only one of '--license', '--modelfile', '--parameters', '--system', or '--template' "
            "can be specified"
        )
    answer = daemon().post("/api/show", {"model": model, "verbose": verbose})
    if wanted:
        print(answer.get(wanted[0], ""))
    else:
        print(show_text(answer, verbose), end="")


@app.command("cp")
def copy(
    source: Annotated[str, typer.Argument(metavar="SOURCE")],
    destination: Annotated[str, typer.Argument(metavar="DESTINATION")],
) -> None:
    """Give a model a second name."""
    daemon().post("/api/copy", {"source": source, "destination": destination})
    print(f"copied '{source}' to '{destination}'")


@app.command("rm")
def remove(models: Annotated[list[str], typer.Argument(metavar="MODEL...")]) -> None:
    """Remove models."""
    client = daemon()
    for model in models:
        client.delete("/api/delete", {"model": model})
        print(f"deleted '{model}'")


# ---------------------------------------------------------------------- loaded models


@app.command()
def ps(
    prefix: Prefix = "",
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Memory and running requests too")
    ] = False,
    is_watching: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again each second")
    ] = False,
    is_history: Annotated[
        bool, typer.Option("--history", help="The last loads and unloads, and why")
    ] = False,
) -> None:
    """The models that are loaded: where, for how long, and how full their KV cache is."""
    from .operation import history_text, ps_text, watch

    client = daemon()
    if is_history:
        print(history_text(client.get("/api/history")["history"], now()))
    elif is_watching:
        watch(lambda: ps_text(client, prefix, verbose, now()))
    else:
        print(ps_text(client, prefix, verbose, now()))


@app.command()
def devices() -> None:
    """What there is to compute on, and how much memory of it is free."""
    from .operation import devices_text

    print(devices_text(daemon().get("/api/devices")["devices"]))


@app.command()
def cancel(
    id: Annotated[str, typer.Argument(metavar="ID", help="As `llmd ps -v` shows it")],
) -> None:
    """End one running request. Its client gets what was answered so far."""
    print(f"cancelled {daemon().post('/api/cancel', {'id': id})['cancelled']}")


@app.command()
def bench(
    model: Model,
    streams: Annotated[
        str, typer.Option(metavar="N,N,...", help="How many answers at once, one after the other")
    ] = "1,4,16",
    tokens: Annotated[int, typer.Option(min=2, help="Length of each answer")] = 64,
    seconds: Annotated[
        float, typer.Option(min=0, help="Length of the series; 0 leaves it out")
    ] = 12.0,
    seed: Annotated[int | None, typer.Option(help="The same prompts again")] = None,
) -> None:
    """Measure a model: one stream, many, a shared prefix, second by second."""
    from .bench_report import run_bench

    run_bench(daemon(), model, streams, tokens, seconds, seed)


@app.command()
def stop(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="A model's name")] = "",
) -> None:
    """Unload a model; without a name, end the daemon, which lets running answers end first."""
    if not model:
        _stop_daemon()
        return
    body = {"model": model, "keep_alive": 0, "stream": False}
    try:
        with Spinner(f"stopping {model}"):
            daemon().post("/api/generate", body)
    except ApiError as error:
        if error.status != 404:
            raise
        raise CommandFailed(f'couldn\'t find model "{model}" to stop') from error


def _stop_daemon() -> None:
    client = client_of(os.environ, read_address(os.environ))
    try:
        client.post("/api/shutdown", {})
    except Unreachable:
        print("no daemon is running")
        return
    with Spinner("stopping the daemon"):
        while _answers(client):
            time.sleep(_STOP_POLL_S)
    print("stopped")


def _answers(client: Client) -> bool:
    try:
        client.get("/api/version", _STOP_PROBE_S)
    except (ApiError, Unreachable):
        return False
    return True
