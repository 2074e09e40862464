"""Bytes to messages and back. Pure: no asyncio, no socket, no thread, no clock. Runs on the master and on every worker.

Read ``handshake`` (who is there), ``frame`` (where a message ends), ``values`` (what a message holds), ``messages`` (what it means) and
``code`` (functions and objects: the only file that unpickles). ``docs/protocol.md`` has the same in prose, with bytes written out by hand.
"""
