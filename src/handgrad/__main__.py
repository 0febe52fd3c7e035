"""python -m handgrad"""

from .cli import main

main()
