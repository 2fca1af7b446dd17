//! A plan as it is carried out.

use serde::Serialize;
use std::time::Duration;

use super::plan::{Call, SessionPlan, Step, Text};

/// One session as it goes on. Its driver asks what comes [next](Self::advance), does it, and asks again:
///
/// - [`Next::Call`]: wait for the think time, send [`messages`](Self::messages), hand the answer to [`answered`](Self::answered).
/// - [`Next::FanOut`]: run the sessions side by side until all have ended.
/// - [`Next::End`]: there is nothing more.
#[derive(Debug)]
pub struct Session {
    plan: SessionPlan,
    /// The next step.
    next: usize,
    /// The system prompt and the conversation after it.
    history: Vec<Message>,
    /// The side call under way.
    side: Option<Message>,
    hung_up: bool,
}

/// One message of a chat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    /// `system`, `user` or `assistant`, as APIs name it.
    pub role: &'static str,
    /// What it says.
    #[serde(rename = "content")]
    pub text: String,
}

/// What a session does next.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// A request.
    Call(NextCall),
    /// Subagents.
    FanOut(Vec<SessionPlan>),
    /// Nothing more.
    End(Ending),
}

/// A request to send; its messages are the session's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextCall {
    /// What it is to the conversation.
    pub kind: CallKind,
    /// From now until it is sent.
    pub think: Duration,
    /// Tokens of the answer: the most to ask for.
    pub output: usize,
    /// The client hangs up this long after sending; then, or when the answer came first, the session is over.
    pub hang_up: Option<Duration>,
}

/// What a call is to the conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallKind {
    /// It goes on from the history as the last call and its answer left it.
    Turn,
    /// It goes on from a history that was replaced.
    Compacted,
    /// It has nothing to do with the history.
    Side,
}

/// How a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It did all it had planned.
    Done,
    /// It stopped without notice.
    Abandoned,
}

impl Session {
    /// A session at its beginning.
    pub fn new(plan: SessionPlan) -> Self {
        let mut session = Self { plan, next: 0, history: Vec::new(), side: None, hung_up: false };
        session.forget();
        session
    }

    /// Its name.
    pub fn id(&self) -> &str {
        &self.plan.id
    }

    /// The session that started it.
    pub fn parent(&self) -> Option<&str> {
        self.plan.parent.as_deref()
    }

    /// Goes on to the next step. A call has to be answered, and a fan-out to have ended, before this is asked again.
    pub fn advance(&mut self) -> Next {
        self.side = None;
        if self.hung_up {
            return Next::End(Ending::Abandoned);
        }
        let at = self.next;
        self.next += 1;
        let Some(step) = self.plan.steps.get_mut(at) else { return Next::End(Ending::Done) };
        match step {
            Step::Stop => {
                self.next = at;
                Next::End(Ending::Abandoned)
            }
            Step::FanOut(plans) => Next::FanOut(std::mem::take(plans)),
            Step::Turn(call) => {
                let call = call.clone();
                self.call(CallKind::Turn, &call)
            }
            Step::Compact(call) => {
                let call = call.clone();
                self.forget();
                self.call(CallKind::Compacted, &call)
            }
            Step::Side(call) => {
                let call = call.clone();
                self.call(CallKind::Side, &call)
            }
        }
    }

    /// The messages of the call that [`advance`](Self::advance) returned.
    pub fn messages(&self) -> &[Message] {
        self.side.as_ref().map_or(&self.history, std::slice::from_ref)
    }

    /// Takes in the whole answer to the call that [`advance`](Self::advance) returned.
    pub fn answered(&mut self, text: String) {
        if self.side.take().is_none() {
            self.history.push(Message { role: "assistant", text });
        }
    }

    fn call(&mut self, kind: CallKind, call: &Call) -> Next {
        let message = Message { role: "user", text: Text::join(&call.text) };
        if kind == CallKind::Side {
            self.side = Some(message);
        } else {
            self.history.push(message);
        }
        self.hung_up = call.hang_up_ms.is_some();
        Next::Call(NextCall {
            kind,
            think: Duration::from_millis(call.think_ms),
            output: call.output,
            hang_up: call.hang_up_ms.map(Duration::from_millis),
        })
    }

    /// Leaves nothing of the history but the system prompt.
    fn forget(&mut self) {
        if self.history.is_empty() && !self.plan.system.is_empty() {
            self.history.push(Message { role: "system", text: Text::join(&self.plan.system) });
        }
        self.history.truncate(usize::from(!self.plan.system.is_empty()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(seed: u64) -> Call {
        Call { think_ms: 7, text: vec![Text { seed, tokens: 3 }], output: 5, hang_up_ms: None }
    }

    fn plan(steps: Vec<Step>) -> SessionPlan {
        SessionPlan { id: "a".into(), parent: None, arrival_ms: None, system: vec![Text { seed: 0, tokens: 4 }], steps }
    }

    fn text(seed: u64) -> String {
        Text::join(&[Text { seed, tokens: 3 }])
    }

    /// Takes the next step, which is a call, and returns what it sends: roles and texts.
    fn sent(session: &mut Session) -> Vec<(&'static str, String)> {
        assert!(matches!(session.advance(), Next::Call(_)));
        session.messages()[1..].iter().map(|message| (message.role, message.text.clone())).collect()
    }

    #[test]
    fn a_turn_sends_the_whole_history_with_the_answers_that_came() {
        let mut session = Session::new(plan(vec![Step::Turn(call(1)), Step::Turn(call(2))]));
        assert_eq!(sent(&mut session), [("user", text(1))]);
        session.answered("yes".into());
        assert_eq!(sent(&mut session), [("user", text(1)), ("assistant", "yes".into()), ("user", text(2))]);
        assert_eq!((session.messages()[0].role, session.messages()[0].text.len()), ("system", 16));
        session.answered("no".into());
        assert_eq!(session.advance(), Next::End(Ending::Done));
        assert_eq!(session.advance(), Next::End(Ending::Done));
    }

    #[test]
    fn a_side_call_sends_its_own_message_and_leaves_no_trace() {
        let mut session = Session::new(plan(vec![Step::Turn(call(1)), Step::Side(call(9)), Step::Turn(call(2))]));
        sent(&mut session);
        session.answered("yes".into());
        assert!(matches!(session.advance(), Next::Call(NextCall { kind: CallKind::Side, .. })));
        assert_eq!(session.messages(), [Message { role: "user", text: text(9) }]);
        session.answered("a title".into());
        assert_eq!(sent(&mut session), [("user", text(1)), ("assistant", "yes".into()), ("user", text(2))]);
    }

    #[test]
    fn a_compaction_leaves_the_system_prompt_and_the_summary() {
        let mut session = Session::new(plan(vec![Step::Turn(call(1)), Step::Compact(call(2)), Step::Turn(call(3))]));
        sent(&mut session);
        session.answered("yes".into());
        assert_eq!(sent(&mut session), [("user", text(2))]);
        session.answered("well".into());
        assert_eq!(sent(&mut session), [("user", text(2)), ("assistant", "well".into()), ("user", text(3))]);
    }

    #[test]
    fn without_a_system_prompt_the_first_message_is_the_users() {
        let mut session =
            Session::new(SessionPlan { system: Vec::new(), ..plan(vec![Step::Turn(call(1)), Step::Compact(call(2))]) });
        for seed in [1, 2] {
            assert!(matches!(session.advance(), Next::Call(_)));
            assert_eq!(session.messages(), [Message { role: "user", text: text(seed) }]);
            session.answered("yes".into());
        }
    }

    #[test]
    fn subagents_are_handed_out_and_the_session_goes_on_after_them() {
        let child = SessionPlan { id: "b".into(), parent: Some("a".into()), ..plan(vec![Step::Turn(call(4))]) };
        let mut session = Session::new(plan(vec![Step::FanOut(vec![child.clone()]), Step::Turn(call(1))]));
        assert_eq!(session.advance(), Next::FanOut(vec![child]));
        assert_eq!(sent(&mut session), [("user", text(1))]);
    }

    #[test]
    fn who_hangs_up_or_stops_sends_nothing_more() {
        let hangs_up = Call { hang_up_ms: Some(20), ..call(1) };
        let mut session = Session::new(plan(vec![Step::Turn(hangs_up), Step::Turn(call(2))]));
        assert!(matches!(session.advance(), Next::Call(NextCall { hang_up: Some(_), .. })));
        assert_eq!(session.advance(), Next::End(Ending::Abandoned));

        let mut session = Session::new(plan(vec![Step::Stop, Step::Turn(call(2))]));
        assert_eq!([(); 2].map(|()| session.advance()), [(); 2].map(|()| Next::End(Ending::Abandoned)));
    }
}
