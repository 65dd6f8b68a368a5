CREATE TABLE about (
	name TEXT COLLATE "C" NOT NULL,
	value TEXT COLLATE "C" NOT NULL,
	PRIMARY KEY (name)
);
CREATE TABLE attempts (
	key BIGSERIAL NOT NULL,
	rollout_key BIGINT NOT NULL,
	sequence_id BIGINT NOT NULL,
	attempt_id TEXT COLLATE "C" NOT NULL,
	status TEXT COLLATE "C" NOT NULL,
	start_time DOUBLE PRECISION NOT NULL,
	end_time DOUBLE PRECISION,
	worker_id TEXT COLLATE "C",
	last_heartbeat_time DOUBLE PRECISION,
	metadata TEXT COLLATE "C" NOT NULL,
	superseded BIGINT NOT NULL,
	last_span BIGINT NOT NULL,
	spans BIGINT NOT NULL,
	bytes BIGINT NOT NULL,
	timeout_at DOUBLE PRECISION,
	silence DOUBLE PRECISION,
	silent_at DOUBLE PRECISION,
	PRIMARY KEY (key),
	UNIQUE (attempt_id)
);
CREATE UNIQUE INDEX attempts_of_rollout ON attempts (rollout_key, sequence_id);
CREATE INDEX attempts_of_worker ON attempts (worker_id) WHERE status IN ('preparing', 'running');
CREATE INDEX attempts_silent ON attempts (silent_at) WHERE silent_at IS NOT NULL;
CREATE INDEX attempts_timeout ON attempts (timeout_at) WHERE timeout_at IS NOT NULL;
CREATE TABLE counts (
	shard TEXT COLLATE "C" NOT NULL,
	name TEXT COLLATE "C" NOT NULL,
	queue TEXT COLLATE "C" NOT NULL,
	number BIGINT NOT NULL,
	PRIMARY KEY (shard, name, queue)
)
 WITH (fillfactor = 50);
CREATE TABLE pack_blocks (
	pack_key BIGINT NOT NULL,
	digest BYTEA NOT NULL,
	PRIMARY KEY (pack_key, digest)
);
CREATE INDEX pack_blocks_of_digest ON pack_blocks (digest);
CREATE TABLE queues (
	key BIGSERIAL NOT NULL,
	name TEXT COLLATE "C" NOT NULL,
	max_open BIGINT,
	PRIMARY KEY (key),
	UNIQUE (name)
);
CREATE TABLE resources (
	key BIGSERIAL NOT NULL,
	resources_id TEXT COLLATE "C" NOT NULL,
	version BIGINT NOT NULL,
	create_time DOUBLE PRECISION NOT NULL,
	body TEXT COLLATE "C" NOT NULL,
	PRIMARY KEY (key),
	UNIQUE (resources_id),
	UNIQUE (version)
);
CREATE TABLE rollouts (
	key BIGSERIAL NOT NULL,
	rollout_id TEXT COLLATE "C" NOT NULL,
	input TEXT COLLATE "C" NOT NULL,
	mode TEXT COLLATE "C",
	resources_id TEXT COLLATE "C",
	status TEXT COLLATE "C" NOT NULL,
	start_time DOUBLE PRECISION NOT NULL,
	end_time DOUBLE PRECISION,
	config TEXT COLLATE "C",
	metadata TEXT COLLATE "C" NOT NULL,
	attempts BIGINT NOT NULL,
	queue TEXT COLLATE "C" NOT NULL,
	priority BIGINT NOT NULL,
	PRIMARY KEY (key),
	UNIQUE (rollout_id)
);
CREATE INDEX rollouts_finished ON rollouts (end_time, status) WHERE end_time IS NOT NULL;
CREATE INDEX rollouts_open ON rollouts (queue) WHERE status IN ('preparing', 'running');
CREATE INDEX rollouts_waiting ON rollouts (queue, priority DESC, key) WHERE status IN ('queuing', 'requeuing');
CREATE TABLE span_packs (
	key BIGSERIAL NOT NULL,
	attempt_key BIGINT NOT NULL,
	first_sequence BIGINT NOT NULL,
	count BIGINT NOT NULL,
	superseded BIGINT NOT NULL,
	sequences TEXT COLLATE "C",
	ids BYTEA NOT NULL,
	body BYTEA NOT NULL,
	PRIMARY KEY (key)
);
CREATE INDEX span_packs_of_attempt ON span_packs (attempt_key, first_sequence);
CREATE TABLE token_blocks (
	digest BYTEA NOT NULL,
	parent BYTEA NOT NULL,
	ids BYTEA NOT NULL,
	PRIMARY KEY (digest)
);
CREATE INDEX token_blocks_of_parent ON token_blocks (parent);
CREATE TABLE workers (
	key BIGSERIAL NOT NULL,
	worker_id TEXT COLLATE "C" NOT NULL,
	last_heartbeat_time DOUBLE PRECISION,
	stats TEXT COLLATE "C" NOT NULL,
	lease_seconds DOUBLE PRECISION,
	lost_at DOUBLE PRECISION,
	lost BIGINT NOT NULL,
	last_error TEXT COLLATE "C",
	PRIMARY KEY (key),
	UNIQUE (worker_id)
);
CREATE INDEX workers_lease ON workers (lost_at) WHERE lost_at IS NOT NULL;
CREATE TABLE servers (server TEXT PRIMARY KEY, number BIGINT NOT NULL, seen TIMESTAMPTZ NOT NULL DEFAULT now()) WITH (fillfactor = 50);
INSERT INTO about VALUES ('schema_version', '3');
