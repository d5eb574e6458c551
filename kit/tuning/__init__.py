"""What this device can do: memory planned and tried, time forecast, switches measured.

Nothing here changes how a step is computed.
"""
