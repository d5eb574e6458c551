"""One file for each notebook, which `python -m kit` runs, too, and the helpers that they share.

A recipe wires the other rooms together and knows all of them; nothing imports a recipe but
notebooks, `python -m kit` and tests. Each step returns a result that draws itself.
"""
