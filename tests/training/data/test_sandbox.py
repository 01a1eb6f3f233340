"""The quick sandbox renders what transformers' own renders, and refuses what that refuses."""

import pytest
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from bestiary.training.data.sandbox import QuickSandbox, compiled

MESSAGES = [
    {"role": "user", "content": " <a> b ", "items": "shadowed", "more": {"x": [1, 2]}},
    {"role": "assistant", "content": "{0} {0.__class__}", "thinking": None},
]
EXPRESSIONS = [
    "m.content.strip().split('>')[0].upper()",
    "m.content | trim | length",
    "m.missing is defined",
    "m.missing",
    "m.missing.deeper",
    "m.thinking is none",
    "m.items is string",
    "m.get('role', 'no')",
    "m.more.x | join(',')",
    "m.more | tojson",
    "m.pop('role')",
    "m.more.x.append(3)",
    "m.update({'a': 1})",
    "m.__class__",
    "m['__class__']",
    "m.content.__class__.__mro__",
    "m.content.format(m)",
    "m.content.format_map({'0': 1})",
    "'{:>4}'.format(7)",
    "m.content.nothing",
    "m.content.nothing()",
    "m.content.startswith()",
    "loop.index0 ~ loop.last ~ loop.nothing",
    "loop.__init__",
    "loop.cycle('a', 'b')",
    "ns.found",
    "ns.missing",
    "ns.__init__",
    "ns.form(m)",
    "range(3) | list",
    "range(10 ** 9)",
    "raise_exception('no')",
    "namespace.__init__.__globals__",
    "cycler.__init__",
]


def outcome(render):
    """The text, or the kind of complaint."""
    try:
        return render()
    except (TemplateError, TypeError, OverflowError, IndexError) as error:
        return type(error)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_decision_is_the_same(expression: str) -> None:
    source = (
        "{%- set ns = namespace(found='yes', form='{0.__class__}'.format) -%}{%- for m in messages -%}"
        "{%- if loop.first -%}{%- set ns.found = m.role -%}{%- endif -%}{{ " + expression + " }}|{%- endfor -%}"
    )
    assert type(compiled(source).environment) is QuickSandbox
    ours = outcome(lambda: compiled(source).render(messages=MESSAGES))
    theirs = outcome(lambda: render_jinja_template(conversations=[MESSAGES], chat_template=source)[0][0])
    assert ours == theirs


def test_the_tag_of_generations_is_known() -> None:
    assert compiled("{% generation %}{{ messages[0].role }}{% endgeneration %}").render(messages=MESSAGES) == "user"
