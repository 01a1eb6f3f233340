"""transformers' own environment for chat templates, with the sandbox's usual decisions looked up, not derived again.

Most of what a short conversation costs is Jinja's sandbox asking the same questions at every `message.content`: whether
a text's `startswith` may be read, whether a dict is a kind of mutable set. The answers here are the same ones, decided
by type where the type decides; whatever is unusual goes Jinja's way. What a template may not do it still may not do.
"""

from __future__ import annotations

from functools import lru_cache
from types import BuiltinMethodType
from typing import Any, cast

import jinja2
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_OF_DICT = frozenset(dir(dict))
# Of texts the sandbox refuses what begins with an underscore, and wraps the two that format.
_OF_TEXT = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"}
_PLAIN = frozenset({str, int, float, bool, type(None), list, dict, tuple})


class QuickSandbox(ImmutableSandboxedEnvironment):
    """Decides as its base does; made only by `compiled`, from an environment that exists."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """What `obj.attribute` is in a template."""
        kind = type(obj)
        if kind is dict:
            if attribute not in _OF_DICT:
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        elif kind is str:
            if attribute in _OF_TEXT:
                return getattr(obj, attribute)
        elif (kind is LoopContext or kind is Namespace) and not attribute.startswith("_"):
            try:
                value = getattr(obj, attribute)
            except AttributeError:
                return super().getattr(obj, attribute)
            if type(value) in _PLAIN:
                return value
        return super().getattr(obj, attribute)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """What a call in a template gives."""
        if type(obj) is BuiltinMethodType and type(obj.__self__) is str:  # of a text: reads nothing of the context
            kwargs.pop("_block_vars", None)
            kwargs.pop("_loop_vars", None)
            return obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)


@lru_cache(maxsize=64)
def compiled(source: str) -> jinja2.Template:
    """A chat template as transformers compiles it: its extensions, filters and functions.

    Raises:
        jinja2.TemplateError: the text is no template.
    """
    found: list[jinja2.Environment] = []

    @jinja2.pass_environment
    def show(environment: jinja2.Environment) -> str:
        found.append(environment)
        return ""

    from transformers.utils.chat_template_utils import render_jinja_template  # seconds, which few processes need

    render_jinja_template(conversations=[[]], chat_template="{{ show_environment() }}", show_environment=show)
    (environment,) = found
    made = environment.overlay()
    if type(environment) is ImmutableSandboxedEnvironment:
        cast(Any, made).__class__ = QuickSandbox
    return made.from_string(source)
