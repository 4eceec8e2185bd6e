"""What passes of both levels know of graphs: nodes by role, fragments, storage, fake inputs."""
