"""Programs of the child process that `handgrad.sandbox` starts. They import nothing of handgrad, and no torch."""
