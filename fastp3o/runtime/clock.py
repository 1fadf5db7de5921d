"""The time that chat templates read: one moment for a whole run, so that midnight changes no text
of it.
"""

import json
from datetime import datetime
from functools import cache, cached_property
from string import ascii_letters

from transformers.utils import chat_template_utils

READS_CLOCK = "strftime_now"
# glibc's flags and modifiers of a directive: `%-d` is a day without a leading zero.
FLAGS = ("", *"-_0^#:EO")
# What follows each % is a directive, unless it is another % or the text behind that one.
MACRO = """\
{%%- macro strftime_now(format) -%%}
    {%%- set written, part = %s, namespace(is_text=true) -%%}
    {%%- for text in format.split('%%') -%%}
        {%%- if part.is_text or not text -%%}
            {{- text if part.is_text else '%%' -}}
            {%%- set part.is_text = not part.is_text -%%}
        {%%- else -%%}
            {%%- set directive = text[:2] if text[:2] in written else text[:1] -%%}
            {{- written.get(directive, '%%' ~ directive) ~ text[directive|length:] -}}
        {%%- endif -%%}
    {%%- endfor -%%}
{%%- endmacro -%%}
"""


class Clock:
    """A clock that stands. moment: the time that it shows, by default that of its making, local and
    without a zone.
    """

    def __init__(self, moment: datetime | None = None):
        # As the function that it stands for reads it.
        self.moment = moment or getattr(chat_template_utils, "datetime", datetime).now()

    def before(self, template: str) -> str:
        """The template with this clock in place of transformers' `strftime_now`, as a macro:
        what templates get must be plain data.
        """
        return self.macro + template if READS_CLOCK in template else template

    @cached_property
    def macro(self) -> str:
        directives = [
            flag + letter
            for flag in FLAGS
            for letter in ascii_letters
            if flag or letter not in "EO"
        ]
        return MACRO % json.dumps(
            {directive: self.moment.strftime(f"%{directive}") for directive in directives}
        )

    def __str__(self) -> str:
        return f"{self.moment:%Y-%m-%d %H:%M}"


@cache
def process_clock() -> Clock:
    """The clock of a process, for commands that have no folder to keep one in."""
    return Clock()
