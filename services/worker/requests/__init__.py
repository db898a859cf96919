"""The common part of prefill and decode workers that handles requests: time limits, early ends,
events, traces, and the ordered writes about their holders."""
