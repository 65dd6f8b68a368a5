BEGIN TRANSACTION;
CREATE TABLE about (
	name TEXT NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "about" VALUES('schema_version','1');
CREATE TABLE attempts (
	"key" INTEGER NOT NULL, 
	rollout_key INTEGER NOT NULL, 
	sequence_id INTEGER NOT NULL, 
	attempt_id TEXT NOT NULL, 
	status TEXT NOT NULL, 
	start_time FLOAT NOT NULL, 
	end_time FLOAT, 
	worker_id TEXT, 
	last_heartbeat_time FLOAT, 
	metadata TEXT NOT NULL, 
	superseded INTEGER NOT NULL, 
	last_span INTEGER NOT NULL, 
	timeout_at FLOAT, 
	silence FLOAT, 
	silent_at FLOAT, 
	PRIMARY KEY ("key"), 
	UNIQUE (attempt_id)
);
INSERT INTO "attempts" VALUES(1,1,1,'at-8cf131f69e2717fa','succeeded',1.79517979329148483279e+09,1.79517979329858708387e+09,'w1',1.79517979329464721677e+09,'{}',0,1,NULL,NULL,NULL);
CREATE TABLE resources (
	"key" INTEGER NOT NULL, 
	resources_id TEXT NOT NULL, 
	version INTEGER NOT NULL, 
	create_time FLOAT NOT NULL, 
	body TEXT NOT NULL, 
	PRIMARY KEY ("key"), 
	UNIQUE (resources_id), 
	UNIQUE (version)
);
CREATE TABLE rollouts (
	"key" INTEGER NOT NULL, 
	rollout_id TEXT NOT NULL, 
	input TEXT NOT NULL, 
	mode TEXT, 
	resources_id TEXT, 
	status TEXT NOT NULL, 
	start_time FLOAT NOT NULL, 
	end_time FLOAT, 
	config TEXT, 
	metadata TEXT NOT NULL, 
	attempts INTEGER NOT NULL, 
	PRIMARY KEY ("key"), 
	UNIQUE (rollout_id)
);
INSERT INTO "rollouts" VALUES(1,'ro-done','{"question":"6 x 7"}',NULL,NULL,'succeeded',1.79517979329040193556e+09,1.79517979329860448835e+09,'{"timeout_seconds":null,"unresponsive_seconds":null,"max_attempts":2,"retry_condition":["failed","timeout","unresponsive"]}','{}',1);
INSERT INTO "rollouts" VALUES(2,'ro-waiting','{"question":"2 + 2"}',NULL,NULL,'queuing',1.79517979330239224435e+09,NULL,NULL,'{}',0);
CREATE TABLE spans (
	"key" INTEGER NOT NULL, 
	attempt_key INTEGER NOT NULL, 
	span_id TEXT NOT NULL, 
	sequence_id INTEGER NOT NULL, 
	trace_id TEXT NOT NULL, 
	parent_id TEXT, 
	name TEXT NOT NULL, 
	start_time FLOAT NOT NULL, 
	end_time FLOAT, 
	status_code TEXT NOT NULL, 
	status_message TEXT, 
	attributes TEXT NOT NULL, 
	events TEXT, 
	resource TEXT, 
	tokens BLOB, 
	superseded INTEGER NOT NULL, 
	PRIMARY KEY ("key")
);
INSERT INTO "spans" VALUES(1,1,'1c6270d26b3a6c39',1,'',NULL,'chat tiny',1.0,2.0,'UNSET',NULL,'{"gen_ai.request.model":"tiny"}',NULL,NULL,X'03000000010000000100000001000000020000000300000004000000000000BF',0);
CREATE TABLE workers (
	"key" INTEGER NOT NULL, 
	worker_id TEXT NOT NULL, 
	last_heartbeat_time FLOAT, 
	stats TEXT NOT NULL, 
	PRIMARY KEY ("key"), 
	UNIQUE (worker_id)
);
INSERT INTO "workers" VALUES(1,'w1',1.79517979329148483279e+09,'{}');
CREATE UNIQUE INDEX attempts_of_rollout ON attempts (rollout_key, sequence_id);
CREATE INDEX attempts_of_worker ON attempts (worker_id) WHERE status IN ('preparing', 'running');
CREATE INDEX attempts_silent ON attempts (silent_at) WHERE silent_at IS NOT NULL;
CREATE INDEX attempts_timeout ON attempts (timeout_at) WHERE timeout_at IS NOT NULL;
CREATE INDEX rollouts_waiting ON rollouts ("key") WHERE status IN ('queuing', 'requeuing');
CREATE UNIQUE INDEX spans_of_attempt ON spans (attempt_key, span_id);
COMMIT;
