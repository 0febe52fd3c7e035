"""The course: the exercises in the order in which to solve them, from a softmax to a whole block."""

from difflib import get_close_matches

from ..errors import HandgradError
from .exercise import Exercise
from .exercises import (
    activation,
    attention,
    block,
    embedding,
    gated,
    layernorm,
    linear,
    lora,
    loss,
    rmsnorm,
    rotary,
    softmax,
)

COURSE: dict[str, Exercise] = {
    module.EXERCISE.name: module.EXERCISE
    for module in (
        softmax, loss, linear, activation, embedding, layernorm, rmsnorm, gated, lora, rotary, attention, block,
    )
}  # fmt: skip


def find(name: str) -> Exercise:
    if name not in COURSE:
        near = get_close_matches(name, COURSE, 1)
        meant = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(COURSE)}"
        raise HandgradError(f"there is no exercise {name!r}: {meant}")
    return COURSE[name]


def number(exercise: Exercise) -> int:
    """Its place in the course, from 1."""
    return list(COURSE).index(exercise.name) + 1


def file_text(exercise: Exercise) -> str:
    """The file to edit: the task as its docstring, then the code."""
    title = f"Exercise {number(exercise)} of {len(COURSE)}: {exercise.title}"
    command = f"handgrad learn {exercise.name}"
    after = f"Edit the body of backward and save, then run:\n  {command}            judges it\n"
    after += f"  {command} --hint     shows a hint"
    return f'"""{title}\n\n{exercise.task()}\n\n{after}\n"""\n\n{exercise.starter()}'
