-- Reading. 10_keys.lua lists keys and common codes.
--
-- match    hash ... -> the number of leading hashes that are indexed
-- stats    -> [[header field, value ...], free, cached, held, holders, waiters,
--             [worker, 1 if fenced else 0 ...], [missing worker ...]]. The version before reads
--             this answer too, so the shares (see read_shares) are among the header's fields
-- holders  first limit -> [[holder, epoch, worker, order, blocks held] ...], by worker. RECOVERING
-- ledger   (part first limit) ... -> [version, next, 1 in a recovery else 0, answer of that part
--          ...], for the audit. The parts of one call are read atomically; answers of several calls
--          are consistent if the version is the same. Parts and answers:
--            blocks    ids first to first + limit - 1, without blocks that were never used and,
--                      in a recovery, cannot be held
--                      -> [[refs or nil ...], [hash or nil ...], [clock in the cache or nil ...],
--                          [block that is indexed under that hash, or nil ...],
--                          [clock among the kept, or nil ...]]
--            returned  -> [block ...]
--            holders   -> [[holder, epoch, worker, order, blocks held, block ...] ...]
--            retentions -> [["owner/name", hash, "retentions owner", hash ...] ...]
--            people    -> [[worker, fenced ...], [waiter, order ...], [waiter, worker ...],
--                          [demanded holder ...], [owner, charged hashes ...]]; takes no range
--            shares    -> [shares, [block, the tenant that pays for it ...]]; takes no range
--            sizes     -> [entries of refs, hashes, index, cached, kept, retained, retained by the
--                          header]; takes no range

define('match', READS, { rest = { HASH } }, function(tag, args)
  return #cached_prefix(find_pool(tag), args)
end)

define('stats', READS, {}, function(tag)
  local pool = find_pool(tag)
  local workers, num_holders = redis.call('HGETALL', tag .. ':workers'), 0
  for i = 1, #workers, 2 do
    num_holders = num_holders + redis.call('ZCARD', tag .. ':holders:' .. workers[i])
  end
  local header = redis.call('HGETALL', tag .. ':pool')
  local function add(name, value) header[#header + 1], header[#header + 2] = name, value end
  local now, used, starts, shares = unpack(read_shares(pool))
  add('share_ms', now)
  add('share_used', used)
  add('share_starts', starts)
  for i = 1, #shares, 2 do add('share/' .. shares[i], shares[i + 1]) end
  return {
    header,
    pool.recovering and redis.call('LLEN', tag .. ':returned') or num_free(pool),
    num_cached(pool),
    redis.call('HLEN', tag .. ':refs'),
    num_holders,
    redis.call('ZCARD', tag .. ':waiters'),
    workers,
    redis.call('SMEMBERS', tag .. ':missing'),
  }
end)

-- Up to `limit` holders from number `first` on, worker by worker.
local function read_holders(pool, first, limit)
  local infos = {}
  for _, worker in ipairs(redis.call('HKEYS', pool.tag .. ':workers')) do
    local key, last = pool.tag .. ':holders:' .. worker, first + limit - #infos - 1
    if last >= first then
      for _, id in ipairs(redis.call('ZRANGE', key, first, last)) do
        local holder = find_holder(pool, id)
        local held = redis.call('HLEN', pool.tag .. ':held:' .. id)
        infos[#infos + 1] = { id, holder.epoch, holder.worker, holder.order, held }
      end
    end
    first = math.max(0, first - redis.call('ZCARD', key))
  end
  return infos
end

define('holders', READS, { NUMBER, NUMBER }, function(tag, args)
  return read_holders(open(tag), tonumber(args[1]), tonumber(args[2]))
end)

local PARTS = {}

function PARTS.blocks(pool, first, limit)
  local ids, hashes = {}, {}
  for id = first, math.min(first + limit, math.max(pool.next, pool.top)) - 1 do
    ids[#ids + 1] = string.format('%d', id)
  end
  local carried = fetch('HMGET', pool.tag .. ':hashes', ids)
  for i = 1, #ids do hashes[i] = carried[i] or '' end
  return {
    fetch('HMGET', pool.tag .. ':refs', ids),
    carried,
    fetch('ZMSCORE', pool.tag .. ':cached', ids),
    fetch('HMGET', pool.tag .. ':index', hashes),
    fetch('ZMSCORE', pool.tag .. ':kept', ids),
  }
end

function PARTS.returned(pool, first, limit)
  return redis.call('LRANGE', pool.tag .. ':returned', first, first + limit - 1)
end

function PARTS.holders(pool, first, limit)
  local rows = read_holders(pool, first, limit)
  for _, row in ipairs(rows) do
    for _, block in ipairs(redis.call('HKEYS', pool.tag .. ':held:' .. row[1])) do
      row[#row + 1] = block
    end
  end
  return rows
end

function PARTS.retentions(pool, first, limit)
  local rows = {}
  local ids = redis.call('ZRANGE', pool.tag .. ':retentions', first, first + limit - 1)
  for i, id in ipairs(ids) do
    local hashes, row = redis.call('LRANGE', pool.tag .. ':retention:' .. id, 0, -1), { id }
    local values = fetch('HMGET', pool.tag .. ':retained', hashes)
    for j, hash in ipairs(hashes) do
      row[2 * j], row[2 * j + 1] = hash, values[j]
    end
    rows[i] = row
  end
  return rows
end

function PARTS.people(pool)
  return {
    redis.call('HGETALL', pool.tag .. ':workers'),
    redis.call('ZRANGE', pool.tag .. ':waiters', 0, -1, 'WITHSCORES'),
    redis.call('HGETALL', pool.tag .. ':waiting'),
    redis.call('SMEMBERS', pool.tag .. ':demands'),
    redis.call('HGETALL', pool.tag .. ':charged'),
  }
end

function PARTS.shares(pool)
  return { read_shares(pool), redis.call('HGETALL', pool.tag .. ':payers') }
end

function PARTS.sizes(pool)
  return {
    redis.call('HLEN', pool.tag .. ':refs'),
    redis.call('HLEN', pool.tag .. ':hashes'),
    redis.call('HLEN', pool.tag .. ':index'),
    redis.call('ZCARD', pool.tag .. ':cached'),
    redis.call('ZCARD', pool.tag .. ':kept'),
    redis.call('HLEN', pool.tag .. ':retained'),
    pool.retained,
  }
end

local function PART(value) return PARTS[value] ~= nil end
local LEDGER = { rest = { PART, NUMBER, NUMBER } }

define('ledger', READS, LEDGER, function(tag, args)
  local pool = find_pool(tag)
  local reply = { pool.version, pool.next, pool.recovering and 1 or 0 }
  for at = 1, #args, 3 do
    local read = PARTS[args[at]]
    reply[#reply + 1] = read(pool, tonumber(args[at + 1]), tonumber(args[at + 2]))
  end
  return reply
end)
