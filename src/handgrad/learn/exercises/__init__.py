"""The exercises, one file each: texts, hints, the quoted solution, and the numbers on which an answer is judged.

Each file has EXERCISE and a function `case`, which makes a Case from the tensors of a layer: random ones, or those of a
sentence; import them through `..course`. These files know the formulas of `paper`; they know nothing of grading.
"""
