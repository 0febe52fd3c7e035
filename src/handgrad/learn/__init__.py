"""The course: twelve exercises, each to write the backward pass of one layer, with hints and solutions.

`course.COURSE` lists the exercises, `grading.grade` judges an answer, `progress.Progress` remembers what was solved,
`result_file` writes that for a teacher and `classroom` reads the files of a class. An answer runs in `sandbox`, never in
this process; the oracles are those of `proof`. This package knows nothing about the page and the command line.
"""
