"""Peers train one model on private data: each trains at home, and only sets of weights travel.

A *peer* is a browser or a Python process. The server trains nothing. It keeps a *weight ledger*, which says for each
acknowledged set what became of it.

| module | content | runs on |
|---|---|---|
| ``entries``, ``ledger``, ``swap``, ``rounds`` | what happens, and what follows from it; pure | server |
| ``sets`` | the one layout of a set: on the wire, in the journal and as a file; pure | both |
| ``frames`` | the messages between a peer and the server; pure | both |
| ``journal`` | the file behind the ledger: written before a post is acknowledged | server |
| ``sessions`` | invitations, keys and cookies; pure | server |
| ``model`` | the text of the model that a peer trains | both |
| ``merging`` | means and merges of whole sets | server |
| ``server``, ``serving`` | the port, and the command ``ddlf peers serve`` | server |
| ``link``, ``peer``, ``joining`` | a Python peer: its connection, its class, its Keras model | peer |
| ``browser`` | what a browser needs: the layer graph of a model, and the engine that trains it | both |
"""
