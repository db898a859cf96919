"""What prefill and decode workers have in common about requests: time limits, early ends, events,
traces, and the ordered writes about their holders."""
