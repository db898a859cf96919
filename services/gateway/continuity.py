"""A ticket that came back must go on exactly where its request is (law 7)."""

from services.common.ticket import Ticket, first_of


def discontinuity(
    ticket: Ticket, submitted: Ticket, received: tuple[int, ...], num_new: int
) -> str:
    """What is wrong with `ticket`: "" if it is the one that was `submitted`, generated so far what
    the client has `received` and `num_new` tokens more."""
    if first_of(ticket.holder_id) != submitted.holder_id or ticket.pool_id != submitted.pool_id:
        return "another holder or pool"
    if ticket.prompt_token_ids != submitted.prompt_token_ids:
        return "another prompt"
    if len(ticket.sequences) != 1 or ticket.sequences[0].index != 0:
        return "other sequences"
    token_ids = ticket.sequences[0].token_ids
    if len(token_ids) != len(received) + num_new or token_ids[: len(received)] != received:
        return f"its tokens are not the {len(received)} received and {num_new} more"
    return ""
