"""Three documents and five answers about them, which quote a small to a large part of their text.

A quotation stands in double quotes and is in the documents word for word, but for line breaks.
"""

DOCUMENTS = """\
[1] Travel policy

Employees book trains and flights through the travel desk. The desk needs the name of the project,
the dates, and the approval of the head of the department. A booking without an approval is
cancelled after two working days, and the employee pays the cancellation fee. Trains are preferred
wherever the journey takes less than five hours from door to door. For longer journeys an economy
flight may be booked. Business class is allowed only on flights of more than eight hours, and only
if a meeting is held on the day of arrival.

Hotels cost at most 140 euros a night in Germany, 170 euros in Switzerland and 120 euros elsewhere
in Europe. If no room is available within the limit, the travel desk may approve up to 30 percent
more, and notes the reason in the booking. Breakfast is part of the room price and is deducted from
the daily allowance. The daily allowance is 28 euros for a full day and 14 euros for the day of
arrival and the day of departure.

Receipts are submitted within 30 days after the end of the journey. Claims that arrive later than
90 days after the journey are not paid. Private cars may be used if no train reaches the
destination; the company pays 0.30 euros for each kilometre, and nothing for parking fines.

[2] Expense tool: user guide

Open the tool, choose "New claim", and select the project. Photograph each receipt from above, on a
dark surface and without a flash. The tool reads the date, the amount and the currency, and asks
for whatever it could not read. Amounts in other currencies are converted at the rate of the
European Central Bank on the day of the receipt. Check the converted amount before you submit the
claim, because it cannot be changed afterwards.

A claim passes through three states. It is a draft until you submit it. It is pending while the
head of the department and the accounting team look at it, which takes up to ten working days. It
is closed when the money has been transferred or the claim has been rejected. A rejected claim
shows the reason, and a corrected copy can be submitted once within 14 days.

If the tool shows the error E-17, the receipt has been used in another claim. If it shows the error
E-23, the project is closed and the project office has to open it again. All other errors are
reported to the help desk, with the number of the claim and a picture of the screen.

[3] Rules for working abroad

Employees may work from another country of the European Union for up to 20 working days a year. The
request is sent to the personnel department at least four weeks before the first day, and names the
address, the dates and a telephone number. The personnel department asks the insurer for the
certificate A1, without which no work may be done abroad. Work from countries outside of the
European Union is not allowed, except for business trips.

The laptop stays in the employee's custody at all times. It must be encrypted, and it must not be
used in a network without the company's VPN. A lost or stolen laptop is reported to the security
team within two hours, by telephone, at any time of the day. The security team then locks the
device and all accounts that were signed in on it. Customer data must not be copied to private
devices, to removable disks or to storage services that the company has not approved.
"""

ANSWERS = {
    "pending": (
        "My claim is still pending after two weeks. Is that normal, and what can I do?",
        """\
Two weeks are still within what the guide describes, if only just. According to the user guide [2],
a claim "is pending while the head of the department and the accounting team look at it, which takes
up to ten working days." Two calendar weeks contain exactly ten working days, so I would expect an
answer today or tomorrow. Public holidays do not count, which may move the end by a day.

There is no button with which you could speed this up. I suggest that you first ask your head of
department whether something is missing, since both of them have to agree before the payment is
made. If the claim is rejected in the end, you have not lost the money yet: the tool "shows the
reason, and a corrected copy can be submitted once within 14 days." Please note the word once. Read
the reason carefully, attach whatever was missing, and only then send the copy.

If you see a message instead of a state, look at its number. E-17 means that "the receipt has been
used in another claim", so compare your older claims first. For anything else you would write to the
help desk.
""",
    ),
    "hotel": (
        "Which hotel may I book in Zurich, and who pays if everything is more expensive?",
        """\
For Zurich the limit for Switzerland applies. The travel policy [1] says: "Hotels cost at most 140
euros a night in Germany, 170 euros in Switzerland and 120 euros elsewhere in Europe." So look for a
room of up to 170 euros first.

If you do not find one, you need not pay the difference yourself, as long as you ask before you
book: "If no room is available within the limit, the travel desk may approve up to 30 percent more,
and notes the reason in the booking." In your case that would be up to 221 euros a night. More than
that is not covered by the policy, so please talk to your head of department in this case.

Two details matter for your expenses. First, "Breakfast is part of the room price and is deducted
from the daily allowance." Second, the allowance itself is lower on the days on which you travel:
"The daily allowance is 28 euros for a full day and 14 euros for the day of arrival and the day of
departure." When you are back, do not wait too long with the bill, because the claim has to arrive
in time.
""",
    ),
    "laptop": (
        "My laptop was stolen in Lisbon, where I work for three weeks. What do I have to do?",
        """\
Call the security team at once. The rules for working abroad [3] are strict here: "A lost or stolen
laptop is reported to the security team within two hours, by telephone, at any time of the day." You
do not have to lock anything yourself: "The security team then locks the device and all accounts
that were signed in on it."

Tell them which data were on the disk. The rules require that the device was encrypted, and that
"Customer data must not be copied to private devices, to removable disks or to storage services that
the company has not approved." If you followed this, the damage is limited to the device.

Your stay itself is covered, because "Employees may work from another country of the European Union
for up to 20 working days a year." Three weeks are 15 working days. Keep the certificate with you:
"The personnel department asks the insurer for the certificate A1, without which no work may be done
abroad."
""",
    ),
    "receipts": (
        "How do I get my money back after a trip with the train and a private car?",
        """\
The travel policy [1] sets the deadlines: "Receipts are submitted within 30 days after the end of
the journey. Claims that arrive later than 90 days after the journey are not paid." For the car it
says: "Private cars may be used if no train reaches the destination; the company pays 0.30 euros for
each kilometre, and nothing for parking fines."

The user guide [2] explains the steps. "Photograph each receipt from above, on a dark surface and
without a flash. The tool reads the date, the amount and the currency, and asks for whatever it
could not read." If you paid in francs, "Amounts in other currencies are converted at the rate of
the European Central Bank on the day of the receipt. Check the converted amount before you submit
the claim, because it cannot be changed afterwards."

After that you wait: "It is pending while the head of the department and the accounting team look at
it, which takes up to ten working days. It is closed when the money has been transferred or the
claim has been rejected."
""",
    ),
    "extract": (
        "Quote what the documents say about errors of the tool and about bookings.",
        """\
On errors, from [2]: "If the tool shows the error E-17, the receipt has been used in another claim.
If it shows the error E-23, the project is closed and the project office has to open it again. All
other errors are reported to the help desk, with the number of the claim and a picture of the
screen."

On bookings, from [1]: "Employees book trains and flights through the travel desk. The desk needs
the name of the project, the dates, and the approval of the head of the department. A booking
without an approval is cancelled after two working days, and the employee pays the cancellation fee.
Trains are preferred wherever the journey takes less than five hours from door to door. For longer
journeys an economy flight may be booked. Business class is allowed only on flights of more than
eight hours, and only if a meeting is held on the day of arrival."
""",
    ),
}
