"""Federated rounds over HTTPS: a hub keeps the versions of one model, members train and send updates.

- ``protocol``: messages, signatures, invites and TLS that hub and members share.
- ``rounds``: pure decisions about leases and rounds.
- ``aggregation``: checks and merging of updates.
- ``storage``: log, blobs and versions on the hub's disk.
- ``server``: the hub's process; ``mirror`` and ``region``: the two other kinds of hub.
- ``object_store``: blobs in an S3 bucket; ``web``: status page, metrics, OpenAPI.
- ``client``: a member's side.

May import ``compression`` and the layers below it. Only the modules that merge updates load torch; a hub
answers before they are loaded.
"""
