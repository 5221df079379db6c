"""Communicators that carry bytes between ranks: TCP sockets between CPUs, or torch.distributed (Gloo, NCCL).

- `communicator`: `Communicator`, the interface of all of them
- `choose`: communicator for the name of a backend
- `addresses`: IPv4 and IPv6 addresses, written, read and listened on
- `rendezvous`: store at which the members of a group meet
- `process_group`: groups over torch.distributed, with Gloo or NCCL
- `waiter`: waits on a library that the caller can give up
- `tcp_group`: groups over TCP between CPUs
- `tcp_handshake`: TCP connections between all members, made and checked
- `tcp_io`: I/O thread that moves messages through the connections
- `iovec`: messages in many places of memory, sent and received without packing
- `peer_errors`: errors that name the missing peer
"""
