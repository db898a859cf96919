"""Converts tickets, their states and loads to protobuf messages and back.

Gateways and workers prove to each other that they know the deployment's secret. So neither checks
the fields of what the other one sends: the store's claim and the stamps show whether a ticket is
true.
"""

from blockstore.registry import Load
from quire.v1 import ticket_pb2, worker_pb2
from services.protocol.fields import from_wire, to_fields
from services.protocol.messages import LoadReport
from services.protocol.sampling_codec import sampling_from_wire
from services.protocol.ticket import Ticket, TicketState


def ticket_to_wire(ticket: Ticket) -> ticket_pb2.Ticket:
    return ticket_pb2.Ticket(**to_fields(ticket))


def ticket_from_wire(message: ticket_pb2.Ticket) -> Ticket:
    return from_wire(Ticket, message, sampling=sampling_from_wire(message))


def state_to_wire(state: TicketState) -> ticket_pb2.TicketState:
    return ticket_pb2.TicketState(**to_fields(state.state))


def load_to_wire(report: LoadReport) -> worker_pb2.WorkerLoad:
    return worker_pb2.WorkerLoad(**to_fields(report.load), draining=report.draining)


def load_from_wire(message: worker_pb2.WorkerLoad) -> LoadReport:
    return LoadReport(from_wire(Load, message), message.draining)
