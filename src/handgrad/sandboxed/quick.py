"""Beginnings of a long conversation in linear time: the loop over the messages is entered where a beginning ends.

A template that goes through the messages one by one renders a beginning of the conversation as the whole, up to the last
message of the beginning; from there on it can differ. So the whole is rendered once while its loop is watched: how much
text was there before each message, and what the template's namespaces held. A beginning is then that text, followed by a
rendering whose loop starts at its last message, with the namespaces as they were.

This holds if the watched rendering, before the loop and inside it, looked at nothing but the first message and those up
to the one after the current one, and kept nothing but plain values in namespaces. Anything else raises Unclear, and the
beginnings are rendered in full.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import LoopContext, Undefined
from jinja2.utils import Namespace, missing

Messages = list[dict[str, Any]]
Around = Callable[[int], tuple[int, int] | None]
LAZY = ("map", "select", "reject", "selectattr", "rejectattr", "batch", "slice")  # they give what can be read once only
PLAIN = (str, int, float, list, tuple, dict, Undefined, type(None))


class Unclear(Exception):
    """The template looks at the conversation in a way that this cannot follow."""


class Quick:
    """A template of `templates.Template`, compiled so that its loop can be watched and entered later."""

    def __init__(self, template: Any):
        self.given = template.given
        self._watch: Watch | None = None
        from_env = template._template.environment
        env = from_env.overlay()
        env.filters = from_env.filters | {name: _at_once(from_env.filters[name]) for name in LAZY}
        env.filters |= {"_loop": self._loop, "random": _unclear}
        env.globals = from_env.globals | {"namespace": self._namespace}
        env.globals |= dict.fromkeys(("cycler", "joiner", "lipsum"), _unclear)
        tree = env.parse(template.source)
        _mark_loops(tree.body, env)
        self._template = env.template_class.from_code(env, env.compile(tree), env.make_globals(None))
        self._template.root_render_func.__globals__["LoopContext"] = _Loop

    def around(self, messages: Messages, whole: str, exact: Around) -> Around | None:
        """As Template.rendered_around; None if it has to be used instead."""
        try:
            closed, opened = (self._watched(messages, opening) for opening in (False, True))
        except Exception:
            return None
        if closed.text != whole or not (closed.ended and opened.ended and closed.marks == opened.marks):
            return None
        n = len(messages)
        common = closed.marks[n - 1]
        if opened.text[:common] != closed.text[:common]:
            return None

        def around(i: int) -> tuple[int, int] | None:
            """Both texts begin as the whole does, up to a mark: only their ends are compared."""
            if i < closed.first + 2:
                return exact(i)
            try:
                before, before_at = self._entered(messages[:i], True, opened), opened.marks[i - 1]
                after, after_at = whole[closed.marks[i] :], closed.marks[i]
                if i + 1 < n:
                    after = self._entered(messages[: i + 1], False, closed)
            except Exception:
                return exact(i)
            found = before_at + len(before), after_at + len(after)
            fits = found[0] <= found[1] and whole.startswith(before, before_at) and whole.startswith(after, after_at)
            return found if fits else None

        return around

    def _watched(self, messages: Messages, opening: bool) -> "Watch":
        watch = Watch(messages)
        self._run(watch, opening)
        return watch

    def _entered(self, messages: Messages, opening: bool, known: "Watch") -> str:
        """What follows known.marks[-1 of these messages] when the template is given no more than these."""
        watch = Watch(messages, known)
        self._run(watch, opening)
        at = known.marks[known.first]
        if not watch.ended or watch.marks.get(len(messages) - 1) != at or watch.text[:at] != known.text[:at]:
            raise Unclear
        return watch.text[at:]

    def _run(self, watch: "Watch", opening: bool) -> None:
        self._watch = watch
        parts = []
        context = self._template.new_context(self.given(_View(watch, 0), opening))
        for part in self._template.root_render_func(context):
            watch.emitted += len(part)
            parts.append(part)
        watch.text = "".join(parts)

    def _loop(self, value: Any) -> Any:
        """Stands around what a loop goes through, where its output goes straight into the text."""
        if not isinstance(value, _View):
            return value
        watch = value.watch
        if watch.ended:
            return list(value)
        if watch.current is not None or len(watch.messages) <= value.offset:
            raise Unclear
        return _Main(watch, value.offset)

    def _namespace(self, *args: Any, **named: Any) -> Namespace:
        assert self._watch is not None
        made = Namespace(*args, **named)
        if self._watch.current is None:
            self._watch.namespaces.append(made)
        return made


class Watch:
    """One rendering. With `known`, what was seen of the whole: the loop starts at the last of the messages."""

    def __init__(self, messages: Messages, known: "Watch | None" = None):
        self.messages, self.known = messages, known
        self.text = ""
        self.emitted = 0
        self.first = 0  # message of the loop
        self.current: int | None = None
        self.ended = False
        self.marks: dict[int, int] = {}  # for each message how much text there was before it
        self.states: dict[int, list[dict[str, Any]]] = {}
        self.namespaces: list[Namespace] = []

    @property
    def strict(self) -> bool:
        """Whether more must not be known than a beginning of the conversation tells."""
        return self.known is None and not self.ended

    def advance(self, i: int) -> None:
        """The loop is about to take message i."""
        if i >= len(self.messages):
            self.ended = True
            return
        held = [_attributes(space) for space in self.namespaces]
        if self.known is None:
            if not all(isinstance(value, PLAIN) for values in held for value in values.values()):
                raise Unclear
            self.states[i] = [dict(values) for values in held]
        elif self.current is None:
            for values, then in zip(held, self.known.states[i], strict=True):
                values.clear()
                values.update(then)
        self.current = i
        self.marks[i] = self.emitted


class _View:
    """The messages from `offset` on, as the template sees them."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, watch: Watch, offset: int):
        self.watch, self.offset = watch, offset

    def __getitem__(self, key: Any) -> Any:
        watch = self.watch
        if isinstance(key, slice):
            if key.start in (None, 0, 1) and key.stop is None and key.step is None:
                return _View(watch, self.offset + (key.start or 0))
        elif isinstance(key, int):
            if key >= 0 and self.offset + key <= (0 if watch.current is None else watch.current + 1):
                return watch.messages[self.offset + key]
        else:
            raise TypeError(key)
        return self._everything()[key]

    def __len__(self) -> int:
        return len(self._everything())

    def __bool__(self) -> bool:
        return self.offset == 0 or len(self) > 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self._everything())

    def __eq__(self, other: object) -> bool:
        raise Unclear

    def __repr__(self) -> str:
        raise Unclear

    def _everything(self) -> Messages:
        if self.watch.strict:
            raise Unclear
        return self.watch.messages[self.offset :]


class _Main:
    """What the loop over the messages goes through."""

    def __init__(self, watch: Watch, offset: int):
        self.watch, self.offset = watch, offset
        self.start = offset if watch.known is None else len(watch.messages) - 1
        self.told = (
            False  # by a LoopContext, which looks ahead: then the iterator does not know when a message is taken
        )
        watch.first = offset

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.start, len(self.watch.messages)):
            if not self.told:
                self.watch.advance(i)
            yield self.watch.messages[i]
        if not self.told:
            self.watch.advance(len(self.watch.messages))

    def __len__(self) -> int:
        return len(_View(self.watch, self.offset))


class _Loop(LoopContext):
    """The variable `loop` of a template."""

    def __init__(self, iterable: Any, *rest: Any, **named: Any):
        super().__init__(iterable, *rest, **named)
        self._main = iterable if isinstance(iterable, _Main) else None
        if self._main is not None:
            self._main.told = True
            skipped = self._main.start - self._main.offset
            self.index0 = skipped - 1
            self._current = self._main.watch.messages[self._main.start - 1] if skipped else missing

    def __next__(self) -> tuple[Any, LoopContext]:
        if self._main is not None:
            self._main.watch.advance(self._main.offset + self.index0 + 1)
        return super().__next__()

    def changed(self, *value: Any) -> bool:
        if self._main is not None:
            raise Unclear
        return super().changed(*value)


def _mark_loops(body: list[nodes.Node], env: jinja2.Environment) -> None:
    """The loops whose output goes straight into the text, not into a variable or through a filter."""
    for node in body:
        if isinstance(node, nodes.For):
            if node.test is None and not node.recursive:
                node.iter = nodes.Filter(node.iter, "_loop", [], [], None, None, lineno=node.lineno)
                node.iter.set_environment(env)
            _mark_loops([*node.body, *node.else_], env)
        elif isinstance(node, nodes.If):
            _mark_loops([*node.body, *node.elif_, *node.else_], env)
        elif isinstance(node, nodes.Scope | nodes.With):
            _mark_loops(node.body, env)


def _attributes(space: Namespace) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(space, "_Namespace__attrs")
    return found


def _at_once(lazy: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(lazy)
    def listed(*args: Any, **named: Any) -> list[Any]:
        return list(lazy(*args, **named))

    return listed


def _unclear(*args: Any, **named: Any) -> Any:
    raise Unclear
