"""The ranks' side: workers of trainers and instances, their orders, digests and beats."""
