"""Replicas on Ray Serve: several engines behind one HTTP interface, and streams that survive the death of a replica.

    settings       how many replicas, and what each is given
    application    the three deployments, and `app` for `serve deploy`
    local          `lookahead serve --replicas`: a cluster of one machine
    ingress        speaks HTTP: the same routes, keys and limits as one process, in front of replicas
    front          takes the place of the engine there; it continues a stream when a replica dies
    channels       carry the chunks of many sequences in one stream
    mirror         takes the place of the model and of its sequences there
    conversations  which requests belong together
    replica        an engine, which speaks no HTTP
    ranks          the processes of a replica that is a group of ranks
    board          what the replicas say of themselves; gather: their metrics as one text
    wire           what goes over the hop between ingress and replica

A request passes Ray's HTTP proxy, an ingress and a replica. Every hop carries one chunk per step.
"""

from lookahead.serve.ray.application import app

__all__ = ["app"]
