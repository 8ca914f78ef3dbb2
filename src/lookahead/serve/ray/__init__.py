"""Replicas on Ray Serve: several engines behind one HTTP endpoint, and streams that survive the loss of a replica.

    settings       the number of replicas, and the resources of each
    application    the three deployments, and `app` for `serve deploy`
    local          `lookahead serve --replicas`: a single-machine cluster
    ingress        HTTP: the same routes, keys and limits as one process, in front of replicas
    client         the engine client of an ingress; it resumes a stream when a replica is lost
    channels       multiplex the chunks of many sequences into one stream
    conversations  routes the requests of a conversation to one replica
    replica        an engine without HTTP
    ranks          the processes of a replica that is a group of ranks
    reports        the status of all replicas; gather: their merged metrics

A request passes through Ray's HTTP proxy, an ingress and a replica. Every hop carries one chunk per step.
"""

from lookahead.serve.ray.application import app

__all__ = ["app"]
