"""The `agl` program: its verbs in groups, each loaded when it is called, and the earlier names of their options."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from functools import cache, wraps
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from typing import Any

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from agentlightning.errors import ConfigError
from agentlightning.util.plugins import installed, load_plugin, plugin_names

GROUPS = {
    "Train": {
        "init": ("start:init", "Make a folder to train an agent in."),
        "demo": ("train:demo", "Train an example agent on this machine."),
        "train": ("train:train", "Train an agent on tasks."),
        "sft": ("train:sft", "Learn from demonstrations, or recorded successes."),
        "dpo": ("train:dpo", "Learn from preferences."),
    },
    "Measure": {
        "eval": ("evaluate:evaluate", "Measure an agent on tasks."),
        "compare": ("evaluate:compare_runs", "Compare configurations over seeds."),
        "rescore": ("evaluate:rescore", "Apply a new reward to recorded rollouts."),
        "credit": ("evaluate:CREDIT", "Compare credit rules on recorded rollouts."),
    },
    "Look": {
        "status": ("look:status", "Say how far a run is."),
        "report": ("look:report", "Say what a run changed."),
        "doctor": ("look:doctor", "Say what is wrong with a run."),
        "dashboard": ("look:dashboard", "Show runs and rollouts in the browser."),
        "env": ("look:env", "Print what a report of a fault needs."),
    },
    "Serve": {
        "run": ("run:run", "Run any command as one recorded rollout."),
        "serve": ("serve:serve", "Serve a store and models to other programs."),
        "runner": ("serve:runner", "Run an agent on the rollouts of a server."),
    },
    "Move": {
        "export": ("store:export", "Write the weights or the rollouts of a run."),
        "store": ("store:VERBS", "Inspect a store, and keep it small."),
        "model": ("start:MODEL", "Bring models to this machine."),
        "weights": ("", None),
    },
}
"""The verbs: where each is below this package, and its line in the help of the program; a plugin has its own."""
EARLIER = {
    "--store": "--db",
    "--data": "--dataset",
    "--out": "--output",
    "--run": "--run-dir",
    "--variable": "--env",
    "--target-agent": "--agent",
}
"""Names of options, and what they were called before, which is accepted where no other option has that name."""
NOW = {before: now for now, before in EARLIER.items()}
PLAIN: dict[str, Any] = {"no_args_is_help": True, "pretty_exceptions_enable": False, "rich_markup_mode": None}


def with_groups(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The verb with a parameter for each field of its parameters that are dataclasses: options that belong together."""
    own = inspect.signature(verb, eval_str=True).parameters
    groups: dict[str, Any] = {name: each.annotation for name, each in own.items() if is_dataclass(each.annotation)}
    options = {name: inspect.signature(group, eval_str=True).parameters for name, group in groups.items()}

    @wraps(verb)
    def call(**given: Any) -> Any:
        made = {name: group(**{each: given.pop(each) for each in options[name]}) for name, group in groups.items()}
        return verb(**given, **made)

    all_of = [each for name, one in own.items() for each in options.get(name, {name: one}).values()]
    call.__annotations__ = {each.name: each.annotation for each in all_of}
    call.__signature__ = inspect.Signature(  # pyright: ignore[reportAttributeAccessIssue]
        [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in all_of]
    )
    return call


class Verb(TyperCommand):
    """A verb: a function, or a coroutine, that returns a `Result`, which is printed as text or, with `--json`, as JSON.
    What it raises becomes a message. As `ctx.obj` it finds its `Output`. It accepts the earlier names of its options,
    and says what they are called now."""

    def __init__(self, name: str, *, params: list[Any], **options: Any) -> None:
        shared = typer.Typer(add_completion=False)
        shared.command()(_shared_options)
        super().__init__(name, params=[*params, *get_command(shared).params], **options)

    def invoke(self, ctx: Any) -> None:
        from agentlightning.cli.output import open_output

        with open_output(ctx.params.pop("as_json")) as output:
            ctx.obj = output
            result = super().invoke(ctx)
            if inspect.iscoroutine(result):
                import uvloop

                result = uvloop.run(result)
            if result is not None:
                output.show(result)
                raise typer.Exit(result.status)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, list(self._renamed(ctx, args)))
        except Exception as error:
            found: Any = error  # Typer has click's class under another name in each of its versions.
            if type(error).__name__ == "NoSuchOption" and any(each.name == "settings" for each in self.params):
                found.message += "; settings have no dashes and their full names, as in algorithm.steps=50"
            raise

    def _renamed(self, ctx: Any, words: Sequence[str]) -> Iterator[str]:
        """The words, with what options are called now. Values stay, and so does what is another command's. Raises
        BadParameter for one option by two names."""
        options: dict[str, Any] = {name: each for each in self.params for name in (*each.opts, *each.secondary_opts)}
        given, rest = dict[str, str](), iter(words)
        for word in rest:
            name, equals, value = word.partition("=")
            if word == "--" or not (word.startswith("-") or ctx.allow_interspersed_args):
                yield word
                break
            now = name if name in options else NOW.get(name, name)
            option = options.get(now)
            if option is None or option.param_type_name != "option":
                yield word
                continue
            before = given.setdefault(option.name, name)
            if before != name and not (option.is_flag or option.multiple):
                both = " and ".join(sorted((before, name)))
                raise typer.BadParameter(f"{both} name the same; give only one of them")
            if now != name and not ctx.resilient_parsing:
                typer.echo(f"{name} is called {now} now", err=True)
            yield f"{now}{equals}{value}"
            if not (option.is_flag or equals):
                yield from islice(rest, 1)
        yield from rest

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The help of `agl train` names what distributions announce."""
        rows = [(kind, ", ".join(names)) for kind, names in installed().items() if kind != "commands"]
        if self.name == "train" and rows:
            with formatter.section("Installed extensions (agl env says more)"):
                formatter.write_dl(rows)


def _shared_options(
    as_json: bool = Option(False, "--json", help="Print one JSON object on the last line; progress to stderr."),
) -> None:
    """The options of every verb."""


class LazyVerb(TyperCommand):
    """A line in the help of the program; the verb itself is imported when it is called."""

    def __init__(self, name: str, place: str, text: str | None) -> None:
        super().__init__(name, short_help=text)
        self.verb, self.place = name, place

    @cache  # noqa: B019  as many as there are verbs
    def load(self) -> Any:
        """The verb, or the group of verbs. One that cannot be loaded is hidden, and says why when it is called."""
        app = typer.Typer(name=self.verb, help=self.short_help, **PLAIN)
        module, _, name = self.place.partition(":")
        if not module:
            try:
                load_plugin("commands", self.verb)(app)
            except ConfigError as error:
                return _refusal(self.verb, error)
            return next(iter(get_group(app).commands.values()))
        found = getattr(import_module(f"agentlightning.cli.{module}"), name)
        for verb, function in (found if isinstance(found, dict) else {self.verb: found}).items():
            # Of `agl run`, what follows the first word is the command's.
            app.command(verb, cls=Verb, context_settings={"allow_interspersed_args": verb != "run"})(
                with_groups(function)
            )
        group = get_group(app)
        return group if isinstance(found, dict) else group.commands[self.verb]

    def make_context(self, *args: Any, **extra: Any) -> Any:
        try:
            verb = self.load()
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise
        return verb.make_context(*args, **extra)


class Program(TyperGroup):
    """The program: its help shows the verbs in groups, and imports none of them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        known = {name for verbs in GROUPS.values() for name in verbs}
        others = dict.fromkeys(sorted(plugin_names("commands") - known), ("", None))
        self.groups = {**GROUPS, "Extensions": others}
        for verbs in self.groups.values():
            for name, (place, text) in verbs.items():
                self.add_command(LazyVerb(name, place, text))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, names in self.groups.items():
            verbs: Any = [self.commands[name] for name in names]
            verbs = [verb if verb.short_help else verb.load() for verb in verbs]
            if rows := [(verb.name, verb.get_short_help_str(60)) for verb in verbs if not verb.hidden]:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _refusal(name: str, error: ConfigError) -> TyperCommand:
    """A verb that says why it is not here."""

    def refuse() -> None:
        raise error

    any_arguments = {"ignore_unknown_options": True, "allow_extra_args": True}
    return Verb(name, params=[], callback=refuse, hidden=True, context_settings=any_arguments)


def build() -> typer.Typer:
    """The program with all its verbs."""
    # Torch's threads would spin while they wait: beside any other program, a product on two cores then takes 2 to 4
    # times as long, and more than on one.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    app = typer.Typer(name="agl", cls=Program, **PLAIN)
    app.callback()(_program)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("agentlightning"))
        raise typer.Exit


def _program(
    show_version: bool = Option(False, "--version", help="Print the version.", is_eager=True, callback=_print_version),
) -> None:
    """Train any AI agent, and know whether it helped."""
