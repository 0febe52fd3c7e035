"""The course: twelve exercises, each to write the backward pass of one layer, with hints and solutions.

`course.COURSE` lists the exercises, `grading.grade` judges an answer, `progress.Progress` remembers what was solved. An
answer runs in `sandbox`, never in this process; the oracles are those of `proof`. This package knows nothing about the page
and the command line, which show it.
"""
