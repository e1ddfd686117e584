"""The folders of the package: imports go one way, and no module grows too large to read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pgdefer

PACKAGE = Path(pgdefer.__file__).parent
# Each line imports only from lines above it, and modules of one line not from each other.
LAYERS = [
    line.split()
    for line in """
    _version _text logs checks
    database.sql database.growing_delay database.watchdog database.embedded
    database.own_threads
    errors database.addresses
    options codec
    database.install database.move_in_sql
    database.source
    database.callers
    database.pool database.connection database.pool_source
    database.callers_pool database.callers_pool_async
    database.execute database.execute_async
    database.results
    client.base
    client.calls client.calls_async
    client.client
    tasks.running_steps
    tasks.need tasks.steps tasks.answers tasks.parameters tasks.versions
    tasks.prepared_job tasks.raised tasks.interruptible tasks.error_report
    tasks.schedule tasks.infos tasks.option_checks
    tasks.claim_calls tasks.claim_calls_async tasks.job_calls tasks.job_calls_async
    tasks.tries
    tasks.job
    tasks.deferral
    tasks.submit tasks.submit_async
    tasks.stepping tasks.stepping_async
    tasks.durable tasks.durable_async
    tasks.context
    tasks.middleware tasks.hooks tasks.batch
    tasks.handling tasks.prepared
    tasks.deferrable tasks.deferrable_async tasks.group tasks.open_group
    tasks.task
    tasks.registry
    tasks.decorators
    tasks.defining
    tasks.blueprint
    worker.probes worker.prefetch
    worker.options worker.slots worker.threads worker.memory worker.supervisor worker.state
    worker.unix_signals worker.databases worker.turnstile worker.shielded worker.forked
    worker.outcomes worker.listener worker.process_log
    worker.ending worker.claim
    worker.blocking
    worker.transaction worker.heartbeat
    worker.announcer worker.shared_slots
    worker.completer
    worker.invoke worker.invoke_async
    worker.handler worker.executor worker.registration
    worker.process_main worker.stream_runner worker.fetcher
    worker.invoke_batch worker.invoke_batch_async
    worker.processes
    worker.runners
    worker.batch_runner
    worker.worker
    worker.stream worker.many_databases
    app_deferring app_deferring_async app_managing app_managing_async
    app
    pgdefer
    models alembic cli
    """.strip().splitlines()
]
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
# Modules that come after all of these; none of these imports them.
EXTRAS = ("contrib", "testing")
LAYER |= dict.fromkeys(EXTRAS, len(LAYERS))
# Modules that are separate as a whole.
WHOLE = ("alembic", "cli", "contrib", "testing")
MODULES = {
    ".".join(("pgdefer", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def layer_of(module: str) -> str | None:
    """Return the layer of a module; None for a package that has only a docstring."""
    name = module.removeprefix("pgdefer").removeprefix(".") or "pgdefer"
    first = name.partition(".")[0]
    if first in WHOLE:
        return first
    return None if name in ("database", "client", "tasks", "worker", "__main__") else name


def imports(module: str) -> set[str]:
    """Return the modules of the package that a module imports, also in functions and for types."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
            for _ in range(node.level - 1):
                package = package.rpartition(".")[0]
            base = f"{package}.{node.module or ''}".rstrip(".") if node.level else node.module or ""
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                found.add(submodule if submodule in MODULES else base)
    return found & MODULES.keys() - {module}


def test_imports_go_one_way() -> None:
    upwards = [
        f"{module} imports {other}"
        for module in MODULES
        if (mine := layer_of(module)) is not None
        for other in imports(module)
        if (theirs := layer_of(other)) not in (None, mine) and LAYER[theirs] >= LAYER[mine]
    ]
    assert upwards == []


def test_no_modules_import_each_other_in_a_cycle() -> None:
    graph = {module: imports(module) for module in MODULES}
    while leaves := {module for module, others in graph.items() if not others & graph.keys()}:
        for module in leaves:
            del graph[module]
    assert graph == {}


def test_every_module_has_its_layer() -> None:
    layers = {name for module in MODULES if (name := layer_of(module)) is not None}
    assert layers | set(EXTRAS) == LAYER.keys()


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_core_imports_no_extras(extra: str) -> None:
    core = [module for module in MODULES if not module.startswith(f"pgdefer.{extra}")]
    assert [m for m in core if any(o.startswith(f"pgdefer.{extra}") for o in imports(m))] == []


def test_no_function_is_too_long() -> None:
    long = [
        f"{module}.{node.name}: {length}"
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > 80
    ]
    assert long == []


@pytest.mark.parametrize("name", ["pgdefer.app.App", "pgdefer.worker.worker.Worker"])
def test_no_class_is_too_long(name: str) -> None:
    module, _, kind = name.rpartition(".")
    (node,) = (
        node
        for node in ast.walk(ast.parse(MODULES[module].read_text("utf-8")))
        if isinstance(node, ast.ClassDef) and node.name == kind
    )
    assert (node.end_lineno or 0) - node.lineno + 1 < 400
