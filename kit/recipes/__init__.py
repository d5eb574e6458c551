"""The journeys, in walking order: prepare, train, evaluate, speak, benchmark.

A recipe wires the other rooms together and knows all of them; nothing imports a recipe but
notebooks, `python -m kit` and tests. Each step returns a result that draws itself.
"""
