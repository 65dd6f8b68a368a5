"""The `agl` program: its verbs in groups, each loaded when it is called, and the earlier names of their options."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from importlib import import_module
from importlib.metadata import version
from typing import Any

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group
from typer.models import ParameterInfo

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
    "--db": "--store",
    "--dataset": "--data",
    "--output": "--out",
    "--run-dir": "--run",
    "--env": "--variable",
    "--agent": "--target-agent",
}
"""What options were called before, which is accepted where no other option has that name, and what they are now."""
PLAIN: dict[str, Any] = {"no_args_is_help": True, "pretty_exceptions_enable": False, "rich_markup_mode": None}


def as_command(verb: Callable[..., Any], helping: bool) -> Callable[..., Any]:
    """The verb as Typer takes it. Parameters that are dataclasses are options that belong together, and become a
    parameter for each field; the help of an option stands below its field, or as `NAME: TEXT` in the docstring. Without
    `helping`, that of fields is not read: it takes as long as an import."""
    from agentlightning.util.settings import field_texts

    own = inspect.signature(verb, eval_str=True).parameters
    line = re.compile(rf"^({'|'.join(own)}): (.+(?:\n .+)*)\n*", re.MULTILINE)
    doc = inspect.getdoc(verb) or ""
    texts, groups, all_of = dict(line.findall(doc)), dict[str, Any](), list[inspect.Parameter]()
    for name, each in own.items():
        if is_dataclass(each.annotation):
            groups[name], below = each.annotation, field_texts(each.annotation) if helping else {}
            options = inspect.signature(groups[name], eval_str=True).parameters.values()
            all_of += [_described(option, below.get(option.name)) for option in options]
        else:
            all_of.append(_described(each, texts.get(name)))

    @wraps(verb)
    def call(**given: Any) -> Any:
        made = {
            name: group(**{one.name: given.pop(one.name) for one in fields(group)}) for name, group in groups.items()
        }
        return verb(**given, **made)

    call.__doc__ = line.sub("", doc)
    call.__annotations__ = {each.name: each.annotation for each in all_of}
    call.__signature__ = inspect.Signature(all_of)  # pyright: ignore[reportAttributeAccessIssue]
    return call


def _described(parameter: inspect.Parameter, text: str | None) -> inspect.Parameter:
    """A parameter with its help. Without Typer's own description of it, it is an option, and False a flag."""
    option = parameter.default
    if option is False:
        option = Option(False, f"--{parameter.name.replace('_', '-')}")
    if text:
        option = option if isinstance(option, ParameterInfo) else Option(option)
        option.help = " ".join(text.split())
    return parameter.replace(default=option, kind=inspect.Parameter.KEYWORD_ONLY)


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
            return super().parse_args(ctx, args)
        except Exception as error:
            found: Any = error  # Typer has click's class under another name in each of its versions.
            if type(error).__name__ == "NoSuchOption" and any(each.name == "settings" for each in self.params):
                found.message += "; settings have no dashes and their full names, as in algorithm.steps=50"
            raise

    def make_parser(self, ctx: Any) -> Any:
        """A parser that takes options by their earlier names, too. It raises BadParameter for one option by two names,
        and leaves values as they are, and what is another command's."""
        parser = super().make_parser(ctx)
        options = {name: each for each in self.params for name in each.opts}
        given = dict[Any, str]()

        def current_name(name: str) -> str:
            word = f"--{name}"
            now = word if word in options else EARLIER.get(word, word)
            option = options.get(now)
            if option is None:
                return name
            before = given.setdefault(option, word)
            if before != word and not option.multiple:
                both = " and ".join(sorted((before, word)))
                raise typer.BadParameter(f"{both} name the same; give only one of them")
            if now != word and not ctx.resilient_parsing:
                typer.echo(f"{word} is called {now} now", err=True)
            return now.removeprefix("--")

        ctx.token_normalize_func = current_name
        return parser

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


class Program(TyperGroup):
    """The program: its help shows the verbs in groups. A verb is imported when it is called."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.verbs = {name: verb for verbs in GROUPS.values() for name, verb in verbs.items()}
        others = dict.fromkeys(sorted(plugin_names("commands") - self.verbs.keys()), ("", None))
        self.verbs |= others
        self.groups = {**GROUPS, "Extensions": others}
        for name, (_, text) in self.verbs.items():
            self.add_command(TyperCommand(name, short_help=text))

    def load(self, name: str, helping: bool = True) -> Any:
        """The verb, or the group of verbs, by `as_command`. One that cannot be loaded is hidden, and says why
        when it is called."""
        place, text = self.verbs[name]
        app = typer.Typer(name=name, help=text, **PLAIN)
        module, _, function = place.partition(":")
        if not module:
            try:
                load_plugin("commands", name)(app)
            except ConfigError as error:
                return _refusal(name, error)
            return next(iter(get_group(app).commands.values()))
        found = getattr(import_module(f"agentlightning.cli.{module}"), function)
        for verb, function in (found if isinstance(found, dict) else {name: found}).items():
            # Of `agl run`, what follows the first word is the command's.
            app.command(verb, cls=Verb, context_settings={"allow_interspersed_args": verb != "run"})(
                as_command(function, helping)
            )
        group = get_group(app)
        return group if isinstance(found, dict) else group.commands[name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        try:
            return name, name and self.load(name, ctx.resilient_parsing or "--help" in rest), rest
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, known in self.groups.items():
            verbs: Any = [self.commands[name] if text else self.load(name) for name, (_, text) in known.items()]
            if rows := [(verb.name, verb.get_short_help_str(60)) for verb in verbs if not verb.hidden]:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _refusal(name: str, error: ConfigError) -> TyperCommand:
    """A verb that says why it is not here."""

    def refuse() -> None:
        raise error

    any_words = {"ignore_unknown_options": True, "allow_extra_args": True}
    return Verb(name, params=[], callback=refuse, hidden=True, context_settings=any_words)


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
