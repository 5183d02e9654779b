"""What the scheduler knows: requests, shards and who is where. Events change it, plans are made from it."""

from typing import TYPE_CHECKING

from caravan_router.scheduling.config import SchedulerConfig
from caravan_router.scheduling.outbox import Outbox
from caravan_router.scheduling.planning.output_length import OutputLengths
from caravan_router.scheduling.sequence import Request, Sequence
from caravan_router.scheduling.waiting.deadlines import Deadlines
from caravan_router.scheduling.waiting.fair_share import FairShare
from caravan_router.scheduling.waiting.queue import WaitingQueue

if TYPE_CHECKING:
    from caravan_router.core.tenant import Tenant
    from caravan_router.scheduling.shard.ledger import ShardState
    from caravan_router.scheduling.shard.resident import Resident


class SchedulerState:
    """Every request that has not ended is in ``sequences``, and either ``waiting`` or in ``residents``."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.fair_share = FairShare()
        self.lengths = OutputLengths()
        self.deadlines = Deadlines()
        self.waiting = WaitingQueue(config.max_bypass, config.aging_s, self.fair_share)
        self.outbox = Outbox()
        self.shards: dict[str, ShardState] = {}
        self.sequences: dict[int, Sequence] = {}
        self.residents: dict[int, tuple[ShardState, Resident]] = {}
        # Something happened since the queue was last looked through that may let somebody in.
        self.queue_is_due = True
        # With the number of requests that have not ended.
        self._tenants: dict[str, tuple[Tenant, int]] = {}

    def enter(self, request: Request) -> Sequence:
        """A new request waits."""
        tenant = request.spec.tenant
        _, active = self._tenants.get(tenant.name, (tenant, 0))
        if active == 0:
            self.fair_share.activate(tenant, [other for other, _ in self._tenants.values()])
        self._tenants[tenant.name] = (tenant, active + 1)
        self.deadlines.add(request)
        sequence = self.sequences[request.request_id] = Sequence(request)
        self.waiting.push(sequence)
        return sequence

    def forget(self, request_id: int) -> Sequence:
        """The request has ended."""
        self.queue_is_due = True
        sequence = self.sequences.pop(request_id)
        tenant, active = self._tenants.pop(sequence.spec.tenant.name)
        if active > 1:
            self._tenants[tenant.name] = (tenant, active - 1)
        return sequence

    def wait_again(self, sequence: Sequence) -> None:
        """A resident request lost its cells and waits to go on."""
        del self.residents[sequence.request_id]
        sequence.common.clear()
        self.waiting.push(sequence)

    def drop_ticket(self, sequence: Sequence) -> None:
        """What a shard saved of it is of no more use."""
        ticket, sequence.ticket = sequence.ticket, None
        if ticket is not None and ticket.shard in self.shards:
            self.shards[ticket.shard].drop_handles.append(ticket.handle)
