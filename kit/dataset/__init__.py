"""Recordings in any usual form to a checked manifest, and a ledger of all that was refused.

Knows no batch and no model.
"""
