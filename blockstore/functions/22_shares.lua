-- Shares: how many blocks each tenant uses, and for how long; no registered functions. 10_keys.lua
-- lists the keys, and blockstore/memory/shares.py says which block is charged to which tenant.
--
-- A call adds up what it changes in pool.charges, and `save` writes that once for each tenant: no
-- call looks at a block only to charge it. A use of a block from one time to another is their
-- difference, so two sums tell the time of all uses:
--
--     blocks       used now
--     starts       the starts of all uses, less the ends of those that ended
--     blocks * now - starts is the time of all uses until now, in ms
--
-- The header's `starts` are of all tenants together, modulo 2^52, by what Redis said of T:refs and
-- T:kept, so that an audit can compare them with the sum of the tenants.

local NO_TENANT = '~'
local EPOCH_MS = 1767225600000 -- 2026: shares are counted from here, so that products stay exact
local MODULUS = 2 ^ 52

local function tenant_of(id) return string.match(id, '^([^/]+)/') or NO_TENANT end

local function charge_blocks(pool, tenant, number)
  pool.charges[tenant] = (pool.charges[tenant] or 0) + number
end

local function share_ms() return now_ms() - EPOCH_MS end

-- Writes the changed header and shares, and announces freed blocks and ended waits.
local function save(pool)
  for tenant, number in pairs(pool.charges) do
    if number ~= 0 then
      local starts = string.format('%d', number * share_ms())
      redis.call('HINCRBY', pool.tag .. ':shares', tenant, number)
      redis.call('HINCRBY', pool.tag .. ':shares', tenant .. '/', starts)
    end
  end
  if pool.num_more ~= 0 then
    pool.starts = (pool.starts + pool.num_more * share_ms()) % MODULUS
  end
  local changed, before = { 'version', pool.version + 1 }, pool.before
  for _, name in ipairs(COUNTERS) do
    if pool[name] ~= before[name] then
      changed[#changed + 1], changed[#changed + 2] = name, string.format('%d', pool[name])
    end
  end
  redis.call('HSET', pool.tag .. ':pool', unpack(changed))
  if pool.has_news then redis.call('SPUBLISH', pool.tag .. ':room', '') end
end

-- {now, used blocks, starts, {tenant, blocks, tenant/, starts ...}}, as texts
local function read_shares(pool)
  local used = redis.call('HLEN', pool.tag .. ':refs') + redis.call('ZCARD', pool.tag .. ':kept')
  local numbers = { share_ms(), used, pool.starts }
  for i, number in ipairs(numbers) do numbers[i] = string.format('%d', number) end
  return { numbers[1], numbers[2], numbers[3], redis.call('HGETALL', pool.tag .. ':shares') }
end

-- The number of a hash's retentions, and the owner who is charged for it.
local function parse_retained(value)
  local count, owner = string.match(value, '^(%d+) (.*)$')
  return tonumber(count), owner
end

-- Charges the cached blocks of those hashes that are retained to the owners of the hashes.
local function charge_owners(pool, hashes, number)
  if pool.retained == 0 then return end
  for _, value in ipairs(fetch('HMGET', pool.tag .. ':retained', hashes)) do
    if value then
      local _, owner = parse_retained(value)
      charge_blocks(pool, owner, number)
    end
  end
end
