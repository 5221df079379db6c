"""Groups that carry bytes between ranks: sockets of our own between CPUs, or torch.distributed (Gloo, NCCL).

`communicator` is the interface of a group, and `choose` joins the group of a backend. `tcp_group` and `process_group`
are the two kinds of groups; `rendezvous` is where their members meet.
"""
