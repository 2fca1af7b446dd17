-- The least of what Homing does: from the session's id an upstream, and its address in the header that override_host goes by.
-- `upstreams`, the list of addresses, stands in front of this. The external processor computes the same.
function envoy_on_request(handle)
  local headers = handle:headers()
  local session = headers:get("x-session-id")
  if session then
    local hash = 0
    for at = 1, #session do
      hash = (hash * 31 + session:byte(at)) % 4294967296
    end
    headers:replace("x-homing-targets", upstreams[hash % #upstreams + 1])
  end
end
