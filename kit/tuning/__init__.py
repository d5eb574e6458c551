"""What this device can do: memory planned and tried, time estimated, switches measured.

Nothing here changes how a step is computed.
"""
