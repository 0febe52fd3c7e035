"""python -m handgrad"""

from .cli.app import main

main()
