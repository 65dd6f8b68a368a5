"""Promises about switching on the instrumentations of other packages, found as OpenTelemetry finds them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.util._once import Once

import agentlightning as agl
from agentlightning.recording import instrumentors
from agentlightning.store.types import RolloutRecord

Read = Callable[..., list[RolloutRecord]]

MODULE = '''
class Instrumentor:
    """As opentelemetry.instrumentation.instrumentor.BaseInstrumentor."""
    on = False
    tracer = None

    @property
    def is_instrumented_by_opentelemetry(self):
        return type(self).on

    def instrument(self, **kwargs):
        type(self).on = True
        type(self).tracer = kwargs["tracer_provider"].get_tracer("{name}")

    def uninstrument(self, **kwargs):
        type(self).on, type(self).tracer = False, None


class Other(Instrumentor):
    on = False


class Missing(Instrumentor):
    def instrument(self, **kwargs):
        pass  # as where its library is not installed: it only logs


class Broken(Instrumentor):
    def instrument(self, **kwargs):
        raise ValueError("cannot patch")


class Sticky(Instrumentor):
    on = False

    def uninstrument(self, **kwargs):
        raise ValueError("cannot go back")


def call():
    if Instrumentor.tracer is not None:
        with Instrumentor.tracer.start_as_current_span("ChatCompletion") as span:
            span.set_attribute("openinference.span.kind", "LLM")
            span.set_attribute("llm.input_messages.0.message.role", "user")
            span.set_attribute("llm.input_messages.0.message.content", "6 x 7?")
            span.set_attribute("llm.output_messages.0.message.role", "assistant")
            span.set_attribute("llm.output_messages.0.message.content", "42")
'''


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, dict[str, str]], None]]:
    """Installs packages with entry points, as pip would."""
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())
    for name in ("OTEL_SEMCONV_STABILITY_OPT_IN", "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    site = tmp_path / "site"
    site.mkdir()
    (site / "agl_fake_instrumentation.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(site))

    def install(package: str, entries: dict[str, str]) -> None:
        info = site / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = agl_fake_instrumentation:{kind}" for name, kind in entries.items()]
        (info / "entry_points.txt").write_text("[opentelemetry_instrumentor]\n" + "\n".join(lines) + "\n")

    yield install
    sys.modules.pop("agl_fake_instrumentation", None)


def test_installed_instrumentations_are_switched_on_and_off(packages: Any, recorded: Read) -> None:
    packages("openinference-instrumentation-fake", {"fakelib": "Instrumentor"})
    import agl_fake_instrumentation as library  # pyright: ignore

    with agl.track_all() as instrumentation:
        assert "fakelib" in instrumentation.switched_on
        with agl.track_session():
            library.call()
    assert instrumentation.switched_on == ()
    with agl.track_session():
        library.call()
    first, second = recorded()
    assert [span.attributes["gen_ai.operation.name"] for span in first.spans] == ["chat"]
    assert "6 x 7?" in first.spans[0].attributes["gen_ai.input.messages"]
    assert second.spans == ()


def test_what_fails_is_named_with_its_reason(packages: Any, caplog: pytest.LogCaptureFixture) -> None:
    packages("opentelemetry-instrumentation-a", {"broken": "Broken", "missing": "Missing", "nowhere": "Nowhere"})
    packages("opentelemetry-instrumentation-b", {"sticky": "Sticky"})
    with caplog.at_level(logging.INFO, logger="agentlightning"):
        instrumentation = agl.track_all()
    assert "cannot patch" in instrumentation.failed["broken"]
    assert "not installed" in instrumentation.failed["missing"]
    assert "Nowhere" in instrumentation.failed["nowhere"]
    assert "sticky" in instrumentation.switched_on
    assert "switched on: " in caplog.text
    assert "cannot switch on broken: opentelemetry-instrumentation-a: ValueError: cannot patch" in caplog.text
    instrumentation.stop()
    instrumentation.stop()
    assert "cannot go back" in instrumentation.failed["sticky"]


def test_one_library_is_recorded_once_and_infrastructure_by_name_alone(packages: Any) -> None:
    packages("opentelemetry-instrumentation-fake", {"fakelib": "Other", "requests": "Other"})
    packages("openinference-instrumentation-fake", {"fakelib": "Instrumentor"})
    import agl_fake_instrumentation as library  # pyright: ignore

    with agl.track_all() as instrumentation:
        assert (library.Instrumentor.on, library.Other.on) == (True, False)
        assert "opentelemetry-instrumentation-fake" in instrumentation.skipped
        assert "requests" not in instrumentation.switched_on
    with agl.track_all(only=["requests"]) as instrumentation:
        assert instrumentation.switched_on == ("requests",)
    with agl.track_all(exclude=["fakelib"]) as instrumentation:
        assert "fakelib" not in instrumentation.switched_on
    with pytest.raises(agl.errors.ConfigError, match=r"only='nothing'.*fakelib"):
        agl.track_all(only=["nothing"])


def test_where_one_package_fails_another_one_takes_its_place(packages: Any) -> None:
    packages("openinference-instrumentation-fake", {"fakelib": "Broken"})
    packages("opentelemetry-instrumentation-fake", {"fakelib": "Other"})
    with agl.track_all() as instrumentation:
        assert "fakelib" in instrumentation.switched_on
        assert "openinference-instrumentation-fake: ValueError: cannot patch" in instrumentation.skipped["fakelib"]
        assert instrumentation.failed == {}


def test_what_was_on_before_stays_on(packages: Any) -> None:
    packages("openinference-instrumentation-fake", {"fakelib": "Instrumentor"})
    import agl_fake_instrumentation as library  # pyright: ignore

    library.Instrumentor().instrument(tracer_provider=trace.NoOpTracerProvider())
    with agl.track_all() as instrumentation:
        assert "before" in instrumentation.skipped["fakelib"]
    assert library.Instrumentor.on


def test_where_nothing_is_installed_it_says_what_to_install(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, packages: Any
) -> None:
    monkeypatch.setattr(instrumentors, "entry_points", lambda group: ())
    with agl.track_all() as instrumentation:
        assert instrumentation.switched_on == ()
    assert "records nothing" in caplog.text
    assert "pip install openinference-instrumentation-openai" in caplog.text
    with pytest.raises(agl.errors.ConfigError, match=r"installed: none\. pip install openinference"):
        agl.track_all(only=["openai"])
