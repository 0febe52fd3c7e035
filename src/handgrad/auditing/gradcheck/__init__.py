"""The gradient checker for one function: `run.check` compares a backward pass with the derivative of its forward pass.

`cases` makes inputs of many shapes, dtypes and layouts, `function` calls what is checked, `numeric` is the right answer with
its own error. Autograd appears in `function` alone, where it runs the backward pass that is checked; nothing here knows
about models.
"""
