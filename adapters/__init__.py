"""What each framework holds, in its own terms: sinks for engines, sources for trainers."""
