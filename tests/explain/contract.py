"""The page's contract, checked: that a value is what a type of json_types declares, and that a field is declared."""

from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from handgrad.explain_page.routes import ROUTES

NOT_FIELDS = ("then", "toJSON")  # what JavaScript itself asks an object for


def problems(value: Any, hint: Any, path: str) -> list[str]:
    """How a value differs from what is declared: a field that is missing, undeclared, or of another type."""
    choices = options(hint)
    if len(choices) > 1:
        found = [problems(value, choice, path) for choice in choices]
        return min(found, key=len)
    (hint,) = choices
    origin = get_origin(hint)
    if is_typeddict(hint):
        if not isinstance(value, dict):
            return [f"{path}: {hint.__name__} expected, not {value!r:.40}"]
        fields = get_type_hints(hint)
        wrong = [f"{path}: {name} is not declared in {hint.__name__}" for name in value.keys() - fields.keys()]
        wrong += [f"{path}: {name} of {hint.__name__} is missing" for name in hint.__required_keys__ - value.keys()]
        shared = [name for name in fields if name in value]
        return wrong + [x for name in shared for x in problems(value[name], fields[name], f"{path}.{name}")]
    if origin is dict and isinstance(value, dict):
        return [x for key, item in value.items() for x in problems(item, get_args(hint)[1], f"{path}[{key}]")]
    if origin in (list, tuple) and isinstance(value, list):
        hints = get_args(hint) if origin is tuple else [get_args(hint)[0]] * len(value)
        return [
            x
            for i, (item, one) in enumerate(zip(value, hints, strict=True))
            for x in problems(item, one, f"{path}[{i}]")
        ]
    if origin is Literal:
        right = value in get_args(hint)
    elif hint is float:
        right = type(value) in (int, float)
    else:
        right = type(value) is hint
    return [] if right else [f"{path}: {hint} expected, not {value!r:.40}"]


def options(hint: Any) -> list[Any]:
    """The types of a union, one after the other."""
    return [*get_args(hint)] if get_origin(hint) in (UnionType, Union) else [hint]


def undeclared(route: str, path: list[str]) -> bool:
    """Whether no type of the route's answer has the field at the end of this path; "[]" is an item of a list."""
    if path[-1] in NOT_FIELDS:
        return False
    hints = options(ROUTES[route].types["return"])
    for step in path:
        found: list[Any] = []
        for hint in hints:
            if is_typeddict(hint):
                found += [x for name, one in get_type_hints(hint).items() if name == step for x in options(one)]
            elif get_origin(hint) is dict:
                found += options(get_args(hint)[1])
            elif get_origin(hint) in (list, tuple) and step == "[]":
                found += [x for one in get_args(hint) for x in options(one)]
        if not found:
            return True
        hints = [x for x in found if x is not NoneType]
    return False


# Records, in the page, every field that its JavaScript reads of an answer: window.reads has [route, …path].
RECORD_READS = """
window.reads = new Set();
const routes = new Map();
const { text } = Response.prototype;
Response.prototype.text = async function () {
  const found = await text.call(this);
  if (this.ok) routes.set(found, new URL(this.url).pathname.replace("/api/", ""));
  return found;
};
const watched = (value, path) => {
  if (value === null || typeof value !== "object") return value;
  for (const key of Object.keys(value)) value[key] = watched(value[key], [...path, Array.isArray(value) ? "[]" : key]);
  if (Array.isArray(value)) return value;
  const get = (target, key) => {
    if (typeof key === "string") window.reads.add(JSON.stringify([...path, key]));
    return target[key];
  };
  return new Proxy(value, { get });
};
const { parse } = JSON;
JSON.parse = (source, reviver) => {
  const found = parse(source, reviver);
  if (document.getElementById("embedded-answers")?.textContent === source) // an exported file
    for (const key of Object.keys(found)) if (key !== "steps") found[key] = watched(found[key], [key.split("?")[0]]);
  return routes.has(source) ? watched(found, [routes.get(source)]) : found;
};
"""
